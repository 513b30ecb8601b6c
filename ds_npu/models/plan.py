"""The ModelPlan: the role of each module of a model, as data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ds_npu.config.roles import Role
from ds_npu.log import aligned
from ds_npu.models import names

SUBLAYERS = (Role.ATTENTION, Role.LINEAR_ATTENTION, Role.MLP, Role.MOE)
"""Parts of a block that each compute on hidden states and return them (Vaswani et al. 2017 call them so)."""


class PlanError(ValueError):
    """Every mistake that keeps a model from having a plan, at once, and before them what the model is."""

    def __init__(self, model: str, problems: Iterable[str], kind: str = "", remedy: str = "") -> None:
        self.problems = tuple(problems)
        self.works = ""
        """Uses of the model without a plan; ``ds_npu.features.driver`` fills them in."""
        count = "1 mistake" if len(self.problems) == 1 else f"{len(self.problems)} mistakes"
        self._kind = kind
        self._mistakes = [f"{count} in the plan of {model}:", *(f"  {problem}" for problem in self.problems), remedy]
        super().__init__(model)

    def __str__(self) -> str:
        return "\n".join(line for line in (self._kind, self.works, *self._mistakes) if line)


@dataclass(frozen=True)
class AttentionShape:
    """The numbers of query heads, and of heads of keys and values, of one attention, and their widths."""

    heads: int
    kv_heads: int
    head_dim: int
    """Width of a head of the queries and keys, its rotary part included."""
    value_dim: int
    latent_key_dim: int = 0
    """Width of a key head's part that LATENT_KEY_VALUE makes: heads * (latent_key_dim + value_dim) outputs, by head."""

    def __str__(self) -> str:
        values = f", values of {self.value_dim}" if self.value_dim != self.head_dim else ""
        shared = f", {self.kv_heads} for keys and values" if self.kv_heads != self.heads else ""
        return f"{self.heads} heads of {self.head_dim}{values}{shared}"


@dataclass(frozen=True)
class ModelPlan:
    """The role of each module of a ``model`` (its class), by name; ``tied``: embedding and head share their weight."""

    model: str
    roles: Mapping[str, Role]
    """Roles of the modules that hold parameters themselves and of the structural ones, in the model's order."""
    blocks: tuple[str, ...]
    """The blocks in the order in which they are executed."""
    attentions: Mapping[str, AttentionShape]
    """Shapes of the attentions whose heads are known."""
    tied: bool = False
    stages: tuple[tuple[str, ...], ...] = ()
    """The blocks of each forward, where several pipeline stages of the model are on this rank; else none."""
    is_partial: bool = field(default=False, compare=False)
    """Whether modules with parameters may have no role: enough where no weights are sharded."""

    @property
    def runs(self) -> tuple[tuple[str, ...], ...]:
        """Blocks that one forward runs one after the other."""
        return self.stages or ((self.blocks,) if self.blocks else ())

    def of(self, name: str) -> Role | None:
        """The role of the module ``name``; None where it has none."""
        return self.roles.get(name)

    def named(self, *roles: Role) -> list[str]:
        """The modules of one of ``roles``, in the model's order."""
        return [name for name, role in self.roles.items() if role in roles]

    @property
    def embedding(self) -> str | None:
        """The table of tokens (of PEFT's copies the one that is trained); None where there is none."""
        return next(reversed(self.named(Role.EMBEDDING)), None)

    @property
    def head(self) -> str | None:
        """The linear to the logits (of PEFT's copies the one that is trained); None where there is none."""
        return next(reversed(self.named(Role.HEAD)), None)

    def sublayer(self, name: str) -> str | None:
        """The innermost attention, MLP or MoE around the module ``name``; None where it stands in none."""
        return self.around(name, *SUBLAYERS)

    def block(self, name: str) -> str | None:
        """The block around the module ``name``; None where it stands in none."""
        return self.around(name, Role.BLOCK)

    def around(self, name: str, *roles: Role) -> str | None:
        """The innermost module around ``name`` that has one of ``roles``."""
        return next((each for each in names.ancestors(name) if self.of(each) in roles), None)

    def inside(self, name: str, *roles: Role) -> list[str]:
        """The modules inside of ``name`` that have one of ``roles``; with no roles, all that have one."""
        wanted = self.named(*(roles or Role))
        return [each for each in wanted if each != name and names.is_inside(each, name)]

    def adapted(self, name: str) -> str | None:
        """The layer that PEFT adds ``name`` to: for ``q_proj.lora_A.default`` it is ``q_proj.base_layer``."""
        # Of experts PEFT wraps each of both parameters: one wrapper in the other.
        layers = (each + depth * f".{names.BASE_LAYER}" for each in names.ancestors(name) for depth in (1, 2))
        layer = next((each for each in layers if each in self.roles), None)
        return None if layer is None or names.is_inside(name, layer) else layer

    def without(self, absent: Collection[str]) -> ModelPlan:
        """The plan of the model without the modules ``absent`` and all inside of them."""
        removed = {name for name in self.roles if not {name, *names.ancestors(name)}.isdisjoint(absent)}
        return replace(
            self,
            roles={name: role for name, role in self.roles.items() if name not in removed},
            blocks=tuple(name for name in self.blocks if name not in removed),
            attentions={name: shape for name, shape in self.attentions.items() if name not in removed},
        )

    def picture(self) -> str:
        """The plan as a table for people; modules that differ only in indices share a row."""
        rows = [(names.abbreviated(group) or "(the model itself)", text) for text, group in _groups(self)]
        return "\n".join([f"Plan of {self.model}", *(f"  {line}" for line in aligned(rows))])


def _groups(plan: ModelPlan) -> Iterator[tuple[str, list[str]]]:
    found: dict[tuple[str, str], list[str]] = {}
    for name, role in plan.roles.items():
        whole = _all_replicated(plan, name) if role is Role.REPLICATED else None
        shown = name if whole is None else f"{whole}.**"
        group = found.setdefault((names.generic(shown), _role_text(plan, name, role)), [])
        if shown not in group:
            group.append(shown)
    for (_, text), group in found.items():
        yield text, group


def _all_replicated(plan: ModelPlan, name: str) -> str | None:
    """The outermost module around ``name`` in which everything is replicated, if that is more than ``name``."""
    around = [each for each in names.ancestors(name) if each]
    whole = [each for each in around if all(plan.roles[inner] is Role.REPLICATED for inner in plan.inside(each))]
    return whole[-1] if whole and len(plan.inside(whole[-1])) > 1 else None


def _role_text(plan: ModelPlan, name: str, role: Role) -> str:
    if name in plan.attentions:
        return f"{role}: {plan.attentions[name]}"
    return f"{role}, tied to {plan.embedding}" if name == plan.head and plan.tied else str(role)
