"""Base classes of what weights/ loads and exports: a model with a Hub checkpoint, modules with a low-rank update or
with weights in few bits.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, Self

import torch
from torch import Tensor, nn

from ligermodels.configs.base import Config
from ligermodels.errors import InputError
from ligermodels.weights.mapping import (
    KeptLayers,
    Piece,
    Rule,
    foreign_adapters,
    is_lora_parameter,
    name_translator,
    plan_pieces,
)

BYTES = "_bytes"  # the suffix of the parameter that has the bytes of a quantised weight


class HubModule(nn.Module):
    """A model whose weights are stored as a Hub checkpoint.

    `state_dict` has a tied parameter once, under its first name. `load_state_dict` takes any of its names, or the Hub's
    names and shapes. Tied parameters stay tied under both, with `assign` too, and under `to_empty`.

    hub_class: written as config.json's `architectures` if the raw configuration has none; the model's name in its repr.
    peft_task: what PEFT calls the model's use, in an adapter's configuration.
    source: the folder that the model was loaded from, None for a new model.
    generation_config: the content of its generation_config.json.
    loaded_rules: of the layout that the weights were loaded from, None for a new model.
    kept: the names of tensors in `source` that the model does not compute. An export copies them from there.
    stored_otherwise: the names of tensors that `source` stores in another dtype than most, such as quantised ones. An
    export copies those that are unchanged.
    stored_dtypes: of the `fp32_tensors`, by name, the dtypes in which `source` stores them.
    modules_to_save: the modules that are trained as a whole beside LoRA, with a weight each; an adapter stores them.
    new_parameters: those that loading leaves alone, because the checkpoint is that of a model with another head.
    left_out: the names of tensors of such a checkpoint that have no place in the model and in its exports.
    """

    hub_class: ClassVar[str]
    peft_task: ClassVar[str] = "CAUSAL_LM"

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.source: Path | None = None
        self.generation_config: dict[str, Any] = {}
        self.loaded_rules: tuple[Rule, ...] | None = None
        self.kept: tuple[str, ...] = ()
        self.stored_otherwise: tuple[str, ...] = ()
        self.stored_dtypes: dict[str, torch.dtype] = {}
        self.modules_to_save: tuple[str, ...] = ()
        self.new_parameters: tuple[str, ...] = ()
        self.left_out: tuple[str, ...] = ()
        self.register_state_dict_post_hook(remove_tied_copies)
        self.register_load_state_dict_pre_hook(accept_hub_names)

    def _get_name(self) -> str:
        return self.hub_class

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point weight, in which it is used; beside LoRA, of the first that is frozen
        as its base."""
        trained = {f"{name}.weight" for name in self.modules_to_save}
        named = ((name, weight) for name, weight in named_weights(self).items() if weight.dtype.is_floating_point)
        return next(w.dtype for name, w in named if name not in trained and not is_lora_parameter(name))

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raises InputError if weights are quantised, which cannot be trained."""
        if requires_grad and any(isinstance(module, QuantisedModule) for module in self.modules()):
            raise InputError(
                "the model's linears are quantised, which cannot be trained: train LoRA on them, with add_lora, or "
                "load the model without quantize"
            )
        return super().requires_grad_(requires_grad)

    def _apply(self, fn, recurse=True):
        """Ties parameters again: to_empty() from the meta device creates a separate one for each name."""
        ties = tied_names(self)
        super()._apply(fn, recurse)
        for name, original in ties.items():
            owner, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(owner), attribute, self.get_parameter(original))
        return self

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError("ligermodels: torch.jit.script is not supported; use torch.compile or torch.export")

    def weight_rules(self) -> tuple[Rule, ...]:
        """The rules that map parameters to the Hub's tensors; a parameter without a rule has the same name there."""
        return ()

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """Further checkpoint layouts that loading accepts, such as the in-memory layout of transformers 5."""
        return ()

    def quantised_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """Further layouts that loading accepts, whose quantised tensors have names of their own. An export has such a
        layout only where it copies these tensors; otherwise that of `weight_rules`."""
        return ()

    def stored_buffers(self) -> dict[str, Tensor]:
        """The buffers that a checkpoint stores, by name: those that a module lists as `stored_buffers`, with
        the value of their elements in a new model."""
        owners = ((prefix, module, getattr(module, "stored_buffers", ())) for prefix, module in self.named_modules())
        return {
            f"{prefix}.{name}": module.get_buffer(name)
            for prefix, module, names in owners
            if module is not self
            for name in names
        }

    def fp32_tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers that stay in fp32 in a model of a narrower dtype, by name: those that a module
        lists as `fp32_tensors`."""
        return {
            f"{prefix}.{name}": tensor
            for prefix, module in self.named_modules()
            if isinstance(module, Fp32Module)
            for name, tensor in module.own_fp32_tensors().items()
        }

    def fp32_parameters(self) -> list[nn.Parameter]:
        return [tensor for tensor in self.fp32_tensors().values() if isinstance(tensor, nn.Parameter)]

    def written_dtype(self, tensor: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which an export in `dtype` writes one of the `fp32_tensors`: no narrower than in `source`, of a
        new model than fp32."""
        return torch.promote_types(dtype, self.stored_dtypes.get(tensor, torch.float32))

    def stored_tensors(self) -> dict[str, Any]:
        """What a checkpoint stores, by name: the parameters, tied ones once, and some buffers. A quantised weight
        stands there under its own name, as a `StoredWeight`, in place of its bytes."""
        return named_weights(self) | self.stored_buffers()

    def kept_tensors(self) -> tuple[str, ...]:
        """Name patterns of tensors that a checkpoint may hold and that the model does not compute."""
        return ()

    def kept_layers(self) -> KeptLayers | None:
        """Lists those of `kept_tensors` that are numbered layers."""
        return None

    def kept_of(self, tensors: Iterable[str]) -> list[str]:
        """Lists those of a checkpoint's tensors that are `kept_tensors`."""
        patterns = self.kept_tensors()
        return [name for name in tensors if any(name_translator(pattern, name) is not None for pattern in patterns)]

    def export_rules(self) -> tuple[Rule, ...]:
        """The layout that an export writes: that of the loaded checkpoint, of a new model that of `weight_rules`."""
        return self.weight_rules() if self.loaded_rules is None else self.loaded_rules


class StoredWeight(Protocol):
    """A weight in few bits. data: its bytes, which may be sharded."""

    @property
    def data(self) -> Tensor: ...

    @property
    def scheme(self) -> str:
        """The name of its format."""
        ...

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the weight is used."""
        ...

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of each tensor that is quantised by itself; together they are all rows, in order."""
        ...

    def quantize(self, weight: Tensor) -> Tensor:
        """A weight of this shape -> its bytes."""
        ...

    def dequantize(self) -> Tensor: ...

    def pack(self, parts: Iterable[Mapping[str, Tensor]]) -> Tensor:
        """The Hub's tensors in few bits that the weight is made of, by the names of their parts -> its bytes."""
        ...

    def unpack(self) -> list[dict[str, Tensor]]:
        """The inverse of `pack`, of this weight's bytes."""
        ...


class QuantisedModule(nn.Module):
    """A module with frozen weights in few bits. The bytes of one are a parameter with its name and the suffix BYTES."""

    def quantised_weights(self) -> Mapping[str, StoredWeight]:
        raise NotImplementedError


class Fp32Module(nn.Module):
    """A module with parameters or buffers that stay in fp32 in a model of a narrower dtype.

    fp32_tensors: their names.
    """

    fp32_tensors: ClassVar[tuple[str, ...]]

    def own_fp32_tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name in self.fp32_tensors if (tensor := getattr(self, name)) is not None}

    def _apply(self, fn, recurse=True):
        """Keeps the bits of these tensors and of their gradients: .to(bfloat16) would round them."""
        kept = {id(x) for tensor in self.own_fp32_tensors().values() for x in (tensor, tensor.grad)}

        def apply(x: Tensor) -> Tensor:
            result = fn(x)
            dtype = torch.promote_types(result.dtype, torch.float32)
            return x.to(result.device, dtype) if id(x) in kept and result.dtype != dtype else result

        return super()._apply(apply, recurse)


def quantised_bytes(model: nn.Module) -> list[nn.Parameter]:
    owners = (module for module in model.modules() if isinstance(module, QuantisedModule))
    return [owner.get_parameter(name + BYTES) for owner in owners for name in owner.quantised_weights()]


def named_weights(module: nn.Module) -> dict[str, Any]:
    """The parameters of a module by name, tied ones once, with quantised weights in place of their bytes."""
    quantised = {
        f"{path}{BYTES}": (path, weight)
        for prefix, owner in module.named_modules()
        if isinstance(owner, QuantisedModule)
        for name, weight in owner.quantised_weights().items()
        for path in (f"{prefix}.{name}".removeprefix("."),)
    }
    return dict(quantised.get(name, (name, parameter)) for name, parameter in module.named_parameters())


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters -> their first name."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    names = ((name, first.setdefault(id(parameter), name)) for name, parameter in every)
    return {name: original for name, original in names if name != original}


def remove_tied_copies(model: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """A hook of state_dict: safetensors refuses tensors that share memory. Inside another module, both names stay:
    wrappers such as FSDP look for every parameter."""
    if prefix:
        return
    for name in tied_names(model):
        state_dict.pop(prefix + name, None)


def accept_hub_names(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: Any
) -> None:
    """A hook of load_state_dict: packs tensors with the Hub's names, and completes tied parameters.

    Tensors that the model does not compute are left out, as other models' state dicts have them.
    A model with adapters of another library takes only the names of its own parameters.
    """
    assert isinstance(model, HubModule)
    shapes = {name: tensor.shape for name, tensor in model.stored_tensors().items()}
    if not foreign_adapters(shapes) and not all(prefix + name in state_dict for name in shapes):
        for rules in (model.weight_rules(), *model.other_weight_rules()):
            if pack_state_dict(state_dict, prefix, plan_pieces(shapes, rules)):
                break
    for name in model.kept_of(key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)):
        del state_dict[prefix + name]
    for name, original in tied_names(model).items():
        tied = prefix + original, prefix + name
        value = next((state_dict[key] for key in tied if key in state_dict), None)
        if value is None:
            continue
        if local_metadata.get("assign_to_params_buffers") and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value)  # one for both names
        state_dict.update(dict.fromkeys(tied, value))


def pack_some(model: HubModule, state_dict: dict[str, Any]) -> None:
    """Packs some of the Hub's tensors, as one file of several holds; the rest of a parameter keeps its values."""
    tensors = model.stored_tensors()
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for rules in (model.weight_rules(), *model.other_weight_rules()):
        pieces = plan_pieces(shapes, rules)
        if {piece.tensor for piece in pieces} >= state_dict.keys():
            found = {piece.parameter for piece in pieces if piece.tensor in state_dict}
            pieces = [piece for piece in pieces if piece.parameter in found]
            for piece in pieces:
                present = piece.from_box(tensors[piece.parameter].detach()[piece.index])
                state_dict.setdefault(piece.tensor, present)
            pack_state_dict(state_dict, "", pieces)
            break


def pack_state_dict(state_dict: dict[str, Any], prefix: str, pieces: list[Piece]) -> bool:
    """Replaces the tensors of `pieces` by the parameters that they fill, if all of them are there with their shapes."""
    stored = [state_dict.get(prefix + piece.tensor) for piece in pieces]
    if any(tensor is None or tensor.shape != piece.shape for tensor, piece in zip(stored, pieces, strict=True)):
        return False
    by_parameter: dict[str, list[tuple[Piece, Tensor]]] = {}
    for piece in pieces:
        by_parameter.setdefault(piece.parameter, []).append((piece, state_dict.pop(prefix + piece.tensor)))
    for parameter, parts in by_parameter.items():
        state_dict[prefix + parameter] = assemble(parts)
    return True


def assemble(parts: list[tuple[Piece, Tensor]]) -> Tensor:
    """The parameter that the tensors of these pieces tile; the tensor itself if there is one of the same shape."""
    (first, tensor), *others = parts
    shape = [max(piece.index[side].stop for piece, _ in parts) for side in range(len(first.index))]
    if not others and not first.view and list(tensor.shape) == shape:
        return tensor
    parameter = tensor.new_empty(shape)
    for piece, part in parts:
        parameter[piece.index] = piece.to_box(part)
    return parameter


class LowRankModule(nn.Module):
    """A module with a low-rank update: scale * B_i A_i is added to the i-th of `columns` of the base's output.

    columns: (start, stop) in the output of each of the P projections that have an update.
    scale: alpha / rank. dropout: probability of dropping an element of the update's input. enabled: whether the
    update is added.
    lora_A: [P rank, in], one A_i after another. lora_B: [Σ (stop - start), rank], one B_i after another. For E stacked
    experts: lora_A [E rank, in] and lora_B [out, rank E], where column j E + e is column j of B_e.
    """

    columns: tuple[tuple[int, int], ...]
    rank: int
    alpha: float
    scale: float
    dropout: float
    enabled: bool = True
    lora_A: nn.Parameter
    lora_B: nn.Parameter
