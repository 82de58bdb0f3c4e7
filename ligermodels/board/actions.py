"""What each address answers: it reads runs, plans, starts, stops and resumes them, and talks to their models.

A request names a run by an id that was given out, never by a path.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ligermodels.board.folders import Place, walk
from ligermodels.board.form import (
    RUN_NAME,
    checked_name,
    form_fields,
    given_settings,
    refuse_links_outside,
    refuse_outside,
)
from ligermodels.board.processes import Answerer, Processes
from ligermodels.board.runs import Library, PublishedRun, WatchedRun, published_runs, saved_steps
from ligermodels.board.series import MAX_NAMES, curve_text
from ligermodels.board.server import Encoded, Events, PageRequest, Refusal, Route
from ligermodels.errors import InputError
from ligermodels.generation.sampling import SamplingOptions
from ligermodels.training.checkpoints.files import step_folder
from ligermodels.training.planning.contradictions import refuse_contradictions
from ligermodels.training.run.folder import CHECKPOINTS
from ligermodels.training.settings.config import TrainConfig
from ligermodels.training.settings.settings import SETTINGS_FILE, as_json_value, config_of_run, with_base_of_adapter
from ligermodels.weights.adapter_config import ADAPTER_CONFIG_FILE
from ligermodels.weights.config_file import CONFIG_FILE

MAX_POINTS, MAX_ROWS = 4000, 400_000  # of a curve, of an answer
HEARTBEAT = 15.0  # seconds; a page that has left is noticed by it
MAX_MESSAGES, MAX_NEW_TOKENS = 1000, 32_768
MAX_MODELS = 1000
TALKERS = 2  # models that answer side by side, each in a process of its own
SAMPLING = ("temperature", "top_p", "top_k", "seed")
SPEAKERS = ("system", "user", "assistant")


class Actions:
    """A context manager: the processes that plan and chat end with it, those that train do not.

    folders: of the board; new runs go into the first.
    """

    def __init__(self, library: Library, folders: Sequence[Path]) -> None:
        self.library, self.folders = library, list(folders)
        self.processes = Processes(self.folders[0])
        self.planner = Answerer("plan", {"HF_HUB_OFFLINE": "1"})  # a plan downloads nothing
        self.talkers = [Answerer("chat") for _ in range(TALKERS)]

    def __enter__(self) -> "Actions":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in (self.planner, *self.talkers):
            worker.end()

    def routes(self) -> dict[tuple[str, str], Route]:
        return {
            ("GET", "/api/events"): lambda request: Events(changes(self.library)),
            ("GET", "/api/curves"): self.curves,
            ("GET", "/api/published"): lambda request: [run.summary() for run in published_runs().values()],
            ("GET", "/api/run"): lambda request: self.shown(request.query).details(),
            ("GET", "/api/samples"): lambda request: self.shown(request.query).samples(),
            ("GET", "/api/completions"): self.completions,
            ("GET", "/api/form"): lambda request: {"fields": form_fields(), "folder": str(self.folders[0])},
            ("POST", "/api/plan"): self.show_plan,
            ("POST", "/api/start"): self.start,
            ("POST", "/api/resume"): self.resume,
            ("POST", "/api/stop"): self.stop,
            ("GET", "/api/process"): lambda request: self.processes.seen(request.query.get("name", "")),
            ("GET", "/api/models"): lambda request: self.models(),
            ("POST", "/api/chat"): self.chat,
        }

    # -- reading runs

    def run_of(self, given: Mapping[str, Any]) -> WatchedRun:
        run = self.library.runs.get(str(given.get("run")))
        if run is None:
            raise Refusal(404, "there is no such run")
        return run

    def shown(self, given: Mapping[str, Any]) -> WatchedRun | PublishedRun:
        return published_runs().get(str(given.get("run"))) or self.run_of(given)

    def curves(self, request: PageRequest) -> Encoded:
        ids = dict.fromkeys(request.query.get("runs", "").split("\n"))
        known: dict[str, WatchedRun | PublishedRun] = {**self.library.runs, **published_runs()}
        runs = [known[id] for id in ids if id in known]
        names = [*dict.fromkeys(request.query.get("names", "").split("\n"))][:MAX_NAMES]
        points = min(MAX_POINTS, MAX_ROWS // max(1, len(runs) * len(names)), int(number_of(request, "points", 1000)))
        first, last = number_of(request, "first", 0), number_of(request, "last", 2.0**53)
        parts = []
        for run in runs:
            version, views = run.metrics.version, run.metrics.view(names, first, last, max(2, points))
            drawn = ",".join(f"{json.dumps(name)}:{curve_text(rows)}" for name, rows in views.items() if len(rows))
            parts.append(f'{json.dumps(run.id)}:{{"version":{version},"curves":{{{drawn}}}}}')
        return Encoded("{" + ",".join(parts) + "}")

    def completions(self, request: PageRequest) -> dict[str, Any]:
        run = self.run_of(request.query)
        span = run.completions_range()
        step = int(number_of(request, "step", span[1] if span else 0))
        return {"range": span, "completions": run.completions_at(step) if span else []}

    # -- training

    def settings(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a form; none of them names anything outside the folders."""
        values = body.get("settings")
        if not isinstance(values, dict):
            raise Refusal(400, "settings are missing")
        settings = given_settings(values)
        refuse_outside(TrainConfig(**settings), self.folders)
        return settings

    def show_plan(self, request: PageRequest) -> dict[str, Any]:
        """The plan, or why there is none: while one types, that is no error."""
        try:
            return self.plan(self.settings(request.body))
        except InputError as error:
            return {"refused": str(error)}

    def plan(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The plan of `train --dry-run`. Raises InputError where that would."""
        question = {"settings": {name: as_json_value(value) for name, value in settings.items()}}
        (made,) = self.planner.ask(question)
        return dict(made)

    def start(self, request: PageRequest) -> dict[str, Any]:
        name, settings = checked_name(request.body.get("name")), self.settings(request.body)
        if request.body.get("unplanned"):  # a model of the Hub, which a plan does not download
            refuse_contradictions(with_base_of_adapter(TrainConfig(**settings)))
        else:
            self.plan(settings)
        self.processes.start(settings, name)
        self.library.look_again()
        return {"run": f"0:{name}", "process": name}

    def resume(self, request: PageRequest) -> dict[str, Any]:
        run = self.run_of(request.body)
        if run.held:
            raise InputError(f"{run.name}: is running")
        for part in (run.place.path, run.place.path / CHECKPOINTS):
            refuse_links_outside(part, self.folders)
        refuse_outside(config_of_run(run.place.path), self.folders)
        return {"process": self.processes.resume(run.place)}

    def stop(self, request: PageRequest) -> dict[str, Any]:
        """Stops a run; one that was started here and is none yet, by the name of its process."""
        name = request.body.get("process")
        if isinstance(name, str) and RUN_NAME.fullmatch(name):
            self.processes.cancel(name)
        else:
            self.processes.stop(self.run_of(request.body).place)
        return {}

    # -- chat

    def models(self) -> list[dict[str, Any]]:
        return [
            {"id": model.id, "name": model.place.name, "kind": model.kind, "step": model.step}
            for model in find_models(self.folders).values()
        ]

    def chat(self, request: PageRequest) -> Events:
        body = request.body
        model, slot = find_models(self.folders).get(str(body.get("model"))), body.get("slot")
        if model is None:
            raise Refusal(404, "there is no such model")
        if type(slot) is not int or not 0 <= slot < TALKERS:
            raise Refusal(400, f"slot is a number below {TALKERS}")
        if model.step is None:
            refuse_outside(TrainConfig(model=str(model.place.path)), self.folders)
        else:
            for part in (model.place.path, step_folder(model.place.path / CHECKPOINTS, model.step)):
                refuse_links_outside(part, self.folders)
        most = body.get("max_new_tokens", 256)
        if type(most) is not int or not 1 <= most <= MAX_NEW_TOKENS:
            raise InputError(f"max_new_tokens is {most!r}; must be a whole number from 1 to {MAX_NEW_TOKENS:,}")
        sampling = {name: body[name] for name in SAMPLING if body.get(name) is not None}
        SamplingOptions(**sampling)
        question = {
            "folder": str(model.place.path), "step": model.step, "folders": [str(folder) for folder in self.folders],
            "messages": given_messages(body), "prompt": str(body.get("prompt", "")), "max_new_tokens": most,
            "sampling": sampling,
        }  # fmt: skip
        return Events(answer_pieces(self.talkers[slot], question))


def changes(library: Library) -> Iterator[Mapping[str, Any] | None]:
    """All runs, then those that have changed, with the ids of all that there are."""
    version = -1
    while not library.over.is_set():
        now = library.version
        yield {"runs": library.newer_than(version), "ids": [*library.runs]}
        version = now
        while not library.over.is_set() and library.wait(version, HEARTBEAT) == version:
            yield None


def number_of(request: PageRequest, name: str, default: float) -> float:
    """A number of the query. Raises Refusal."""
    try:
        value = float(request.query.get(name, default))
    except ValueError:
        value = np.nan
    if not abs(value) <= 2.0**53:
        raise Refusal(400, f"{name} is not a number")
    return value


def given_messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages of a request. Raises Refusal for what is no conversation."""
    messages = body.get("messages", [])
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES:
        raise Refusal(400, f"messages is a list of at most {MAX_MESSAGES}")
    for given in messages:
        if not isinstance(given, dict) or given.get("role") not in SPEAKERS or type(given.get("content")) is not str:
            raise Refusal(400, "a message has a content, a text")
    return [{"role": given["role"], "content": given["content"]} for given in messages]


def answer_pieces(talker: Answerer, question: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The pieces of an answer; what is wrong, as the last of them: the stream has begun by then."""
    try:
        yield from talker.ask(question)
        yield {"end": True}
    except InputError as error:
        yield {"error": str(error)}


class TalkingModel(NamedTuple):
    """place: of the model's folder, of a checkpoint the folder of its run. step: of a checkpoint. written: seconds."""

    id: str
    place: Place
    kind: str
    written: float
    step: int | None = None


def find_models(folders: Sequence[Path]) -> dict[str, TalkingModel]:
    """The models, by their ids: exports before checkpoints, which are of a run and need its data, the newest first.
    One that lies below two of the folders is found below the first."""
    found = (model for number, root in enumerate(folders) for model in models_below(number, root))
    once: dict[tuple[Path, int | None], TalkingModel] = {}
    for model in found:
        once.setdefault((model.place.path, model.step), model)
    ordered = sorted(once.values(), key=lambda model: (model.step is not None, -model.written, -(model.step or 0)))
    return {model.id: model for model in ordered[:MAX_MODELS]}


def models_below(number: int, root: Path) -> Iterator[TalkingModel]:
    for place, names in walk(root, {CHECKPOINTS}):
        try:
            written = place.path.stat().st_mtime
        except OSError:
            continue
        kind = "model" if CONFIG_FILE in names else "adapter" if ADAPTER_CONFIG_FILE in names else None
        if kind and any(name.endswith(".safetensors") for name in names):
            yield TalkingModel(f"{number}:{place.relative}", place, kind, written)
        for step in saved_steps(place).values() if SETTINGS_FILE in names else ():
            yield TalkingModel(f"{number}:{place.relative}:{step}", place, "checkpoint", written, step)
