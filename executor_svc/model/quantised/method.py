"""What a quantisation method is to a loader, and careful access to the settings that config.json gives it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from executor_svc.errors import StartupError
from executor_svc.model.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch


class Method(Protocol):
    """One way of storing the weights of linear layers. `module` is a layer's name, as in model.layers.0.mlp.up_proj."""

    @property
    def summary(self) -> str:
        """For the log: the method, its bits, what shares a scale."""
        ...

    @property
    def unused(self) -> tuple[str, ...]:
        """Endings of tensors that are no part of a weight: scales of activations and of the cache."""
        ...

    def shape(self, module: str, checkpoint: Checkpoint) -> tuple[int, int] | None:
        """(outputs, inputs) as the stored tensors imply them; None where the weight is not stored in this way."""
        ...

    def weight(self, module: str, checkpoint: Checkpoint, shape: tuple[int, int]) -> "torch.Tensor":
        """float32 [outputs, inputs], of exactly `shape`; StartupError where the tensors imply another."""
        ...


@dataclass(frozen=True)
class Settings:
    """`quantization_config` of config.json, or a part of it; complaints name the method, the field and the value."""

    method: str
    values: dict[str, Any]
    source: str  # the file

    def refuse(self, field: str, value: Any, supported: str) -> StartupError:
        """The one line the operator sees."""
        return StartupError(
            f"{self.source}: {self.method} with {field} {value!r} is not supported; supported: {supported}"
        )

    def choice(self, field: str, *supported: Any, default: Any = None) -> Any:
        """The value of `field`, one of `supported`; `default` where it is absent or null."""
        value = self.values.get(field)
        value = default if value is None else value
        if not any(value == s and isinstance(value, bool) == isinstance(s, bool) for s in supported):
            raise self.refuse(field, value, ", ".join(map(str, supported)))
        return value

    def integer(self, field: str, low: int, high: int, default: int | None = None) -> int:
        """The value of `field`, an integer within the range."""
        value = self.values.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(field, value, f"{low} to {high}")
        return value

    def group_size(self, field: str = "group_size", default: int | None = None) -> int:
        """Inputs that share a scale; -1: all of them."""
        value = self.integer(field, -1, 1 << 24, default)
        if value == 0:
            raise self.refuse(field, value, "-1, or 1 and more")
        return value

    def empty(self, field: str) -> None:
        """`field` must be absent, null, false or empty."""
        if self.values.get(field):
            raise self.refuse(field, self.values[field], "none")

    def part(self, field: str) -> "Settings":
        """A nested object; absent or null is an empty one."""
        value = self.values.get(field)
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise self.refuse(field, value, "an object")
        return Settings(self.method, value, self.source)


def num_groups(module: str, checkpoint: Checkpoint, inputs: int, group_size: int) -> int:
    """Groups that `inputs` fall into; StartupError where they do not fill the last one."""
    size = inputs if group_size == -1 else group_size
    if inputs % size:
        raise StartupError(f"{checkpoint.directory}: {module} has {inputs} inputs, no multiple of group_size {size}")
    return inputs // size


def matrix(name: str, checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Extents of tensor `name`, None where there is none; StartupError where it has not two axes."""
    if name not in checkpoint:
        return None
    shape = checkpoint.shape(name)
    if len(shape) != 2:
        raise StartupError(f"{checkpoint.directory}: tensor {name!r} has shape {list(shape)}; it must be a matrix")
    return shape[0], shape[1]


def quantised_modules(method: Method, checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """All layers whose weights are stored in this way, with their shapes."""
    modules = sorted({name.rpartition(".")[0] for name in checkpoint.entries})
    shapes = {module: method.shape(module, checkpoint) for module in modules}
    return {module: shape for module, shape in shapes.items() if shape is not None}
