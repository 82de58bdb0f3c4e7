"""The page's own text, which needs no browser: contrast of its colours, what its form asks first, its scheme."""

import itertools
import re
from importlib.resources import files

import pytest

from ligermodels.board.form import form_fields

PAGE = files("ligermodels.board").joinpath("static")
STYLE = PAGE.joinpath("style.css").read_text()
RULES = re.findall(r"([^{}]+)\{([^{}]*)\}", STYLE)
WITHOUT_TEXT = (".run .bar", ".plan .parts", ".swatch")  # what these selectors fill


def colours(scheme):
    blocks = [dict(re.findall(r"--([\w-]+): (#\w+)", body)) for selector, body in RULES if ":root" in selector]
    light, dark = (block for block in blocks if block)
    assert light.keys() == dark.keys()
    return {"light": light, "dark": dark}[scheme]


def used(declaration):
    """The variables that a declaration takes in rules whose elements have text."""
    rules = [body for selector, body in RULES if not selector.strip().startswith(WITHOUT_TEXT)]
    return set(re.findall(rf"(?:^|[ ;]){declaration}: var\(--([\w-]+)\)", "\n".join(rules)))


def over(colour, ground):
    """(red, green, blue) of a colour on an opaque one; it may have an opacity, #rrggbbaa."""
    *parts, alpha = bytes.fromhex(colour[1:].ljust(8, "f"))
    return [alpha / 255 * part + (1 - alpha / 255) * below for part, below in zip(parts, ground, strict=True)]


def luminance(parts):
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in (part / 255 for part in parts)]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    """The ratio of WCAG 2, from 1 to 21."""
    low, high = sorted(luminance(parts) + 0.05 for parts in (one, other))
    return high / low


def test_the_ratio_of_black_to_white_is_21():
    assert contrast((0, 0, 0), over("#ffffff", (0, 0, 0))) == pytest.approx(21)
    assert contrast(over("#00000080", (255, 255, 255)), (255, 255, 255)) == pytest.approx(4.0, abs=0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_a_contrast_of_4_5_on_every_ground(scheme):
    named = colours(scheme)
    plain, texts = {name: over(named[name], (0, 0, 0)) for name in named}, used("color") - {"on-accent"}
    assert contrast(plain["on-accent"], plain["accent"]) >= 4.5
    grounds = {name: plain[name] for name in used("background") - {"tint", "accent"}}
    assert {"ground", "surface", "raised"} == grounds.keys() and {"ink", "soft", "accent", "bad"} <= texts
    once = {f"tint on {name}": over(named["tint"], below) for name, below in grounds.items()}
    twice = {"tint on both": over(named["tint"], once["tint on surface"])}  # a running run that has the focus
    for text, (name, ground) in itertools.product(texts, (grounds | once | twice).items()):
        assert contrast(plain[text], ground) >= 4.5, (scheme, text, name)


def test_texts_have_the_colours_of_the_scheme_and_are_not_made_fainter():
    bodies = {selector.strip(): body for selector, body in RULES}
    values = [value for body in bodies.values() for value in re.findall(r"(?:^|[ ;])color: ([^;]+)", body)]
    assert all(value == "inherit" or value.startswith("var(--") for value in values)
    fainter = [selector for selector, body in bodies.items() if re.search(r"opacity: 0?\.", body)]
    assert fainter == ["button:disabled"]
    drawn = re.findall(r'fillStyle = colour\("--(\w+)"\)', PAGE.joinpath("chart.js").read_text())
    assert {*drawn} == {"soft", "tint"}  # words, and what is dragged over


def test_the_form_asks_first_what_are_settings():
    (names,) = re.findall(r"const FIRST = \[(.*)\]", PAGE.joinpath("form.js").read_text())
    assert names == '"model", "data", "objective", "lora_rank"'
    assert set(names.replace('"', "").split(", ")) <= {field["name"] for field in form_fields()}


def test_a_scheme_is_kept_by_a_click_alone():
    before, after = PAGE.joinpath("app.js").read_text().split("function flipTheme() {")
    assert "setItem" not in before and after.partition("}")[0].count("setItem") == after.count("setItem") == 1
    assert '("change", setTheme)' in after
