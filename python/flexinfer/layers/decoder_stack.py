"""DecoderStack: a model of fused decoder layers as the calls that it consists of.

    token ids -> embedding -> layer -> ... -> layer -> norm -> head -> logits
                  positions -> rotary embedding, for all layers

1. What transformers does between them (configs, masks, caches) takes 0.7 ms of a step, whatever the
   model: a fourteenth of a decode step of 30 requests in one of eight layers of 512. Of few tokens
   all layers are one call (`decoder_kernel.py`).
2. A prefill wants keys and values of all its tokens, and the logits of one. So in the last layer
   what comes after keys and values, which is most of it, is computed for the rows alone whose
   logits are wanted: an eighth of a prefill in a model of eight layers. llama.cpp does so, too.

Whether a model is such a stack is told by its code, as of a layer (`recognise.py`).
"""

from __future__ import annotations

import ast
from typing import Any

import torch

from flexinfer.layers.decoder import FusedDecoderLayer
from flexinfer.layers.decoder_kernel import forward_layers
from flexinfer.layers.host_linear import MAX_FEW_ROWS
from flexinfer.layers.norm import RMSNorm
from flexinfer.layers.recognise import chain_of, hooks_of, is_of_library, tree_of
from flexinfer.layers.rotary_table import keep_rotary_table


class DecoderStack:
    """REQUIRES a model that `find_decoder_stack` has accepted, and that lives as long."""

    def __init__(self, model: Any) -> None:
        base = model.model
        self._embed: torch.nn.Module = base.embed_tokens
        self._rotary = keep_rotary_table(base.rotary_emb, base.config.max_position_embeddings)
        self._layers: list[FusedDecoderLayer] = list(base.layers)
        self._norm: torch.nn.Module = base.norm
        self._head: torch.nn.Module = model.lm_head
        self._hooks = hooks_of((model, base))
        self._hooks_of_layers = hooks_of(self._layers)

    @property
    def is_watched(self) -> bool:
        """Whether hooks wait in the modules around the layers, which it does not call."""
        return any(self._hooks)

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, *, narrows: bool
    ) -> torch.Tensor:
        """[number of rows, vocab_size], as of the model with `logits_to_keep=rows`.

        token_ids, positions: int64 [tokens]; rows: int64, of the tokens. narrows: whether the last
        layer may compute these rows alone; of few tokens a layer is one call, for all of them.
        """
        x = self._through_layers(token_ids, positions, rows, narrows=narrows)
        logits: torch.Tensor = self._head(self._norm(x))
        return logits[0]

    def _through_layers(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, *, narrows: bool
    ) -> torch.Tensor:
        """Of the rows; nobody holds an embedding beside the outputs of layers."""
        x: torch.Tensor = self._embed(token_ids[None])
        cos_sin = self._rotary(x, position_ids=positions[None])
        is_few = x.shape[1] <= MAX_FEW_ROWS
        found = self._in_one_call(x, cos_sin) if is_few else None
        if found is not None:
            return found.index_select(1, rows)
        for layer in self._layers[:-1]:
            x = layer(x, position_embeddings=cos_sin)
        last = self._layers[-1]
        output: torch.Tensor
        if narrows and not is_few and len(rows) < x.shape[1]:
            output = last(x, position_embeddings=cos_sin, rows=rows)
        else:
            output = last(x, position_embeddings=cos_sin).index_select(1, rows)
        return output

    def _in_one_call(
        self, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor | None:
        """None: a layer's MLP, or who watches it, is to be called from here."""
        if any(self._hooks_of_layers):
            return None
        kernels = []
        for layer in self._layers:
            kernel = layer.kernel()
            if kernel is None or not kernel.has_mlp or "forward" in vars(layer):
                return None
            kernels.append(kernel)
        if len({kernel.shape for kernel in kernels}) > 1:
            return None
        found = forward_layers(kernels, x, cos_sin)
        return None if found is None else found[0]


def find_decoder_stack(model: Any) -> DecoderStack | None:
    """The model as a stack; None: it is none, or is not known to be one."""
    base = getattr(model, "model", None)
    layers = getattr(base, "layers", None)
    if base is None or not isinstance(layers, torch.nn.ModuleList):
        return None
    if any(type(layer) is not FusedDecoderLayer for layer in layers):
        return None
    if type(base.norm) is not RMSNorm or not 0 < len(layers) == base.config.num_hidden_layers:
        return None
    if any("forward" in vars(module) for module in (model, base)):
        return None  # somebody has put something else there
    if not (_is_of_transformers(type(model).forward) and _is_of_transformers(type(base).forward)):
        return None
    return DecoderStack(model) if _is_stack(base) and _is_head_on_base(model) else None


def _is_of_transformers(forward: Any) -> bool:
    """Whether it and all that wraps it are: what somebody has put around it would not be called."""
    return all(map(is_of_library, chain_of(forward)))


LAYERS = (
    "self.layers[:self.config.num_hidden_layers]",
    "enumerate(self.layers[:self.config.num_hidden_layers])",
    "enumerate(self.layers)",  # as many: `find_decoder_stack`
)
POSITIONS = (
    "position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)",
    "position_embeddings = self.rotary_emb(hidden_states, position_ids)",
)
HEADS = (
    [
        "hidden_states = outputs.last_hidden_state",
        "hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep)",
        "logits = self.lm_head(hidden_states)",
    ],
    [
        "hidden_states = outputs.last_hidden_state",
        "logits = self.lm_head(hidden_states[:, slice_indices, :])",
    ],
)
"""How a causal model makes logits: transformers of today, and of 5.17."""


def _is_stack(base: Any) -> bool:
    """Whether the base embeds, calls each layer once and normalises, and does nothing else to the
    numbers of its tokens."""
    made = _making(type(base).forward, {"inputs_embeds", "hidden_states", "position_embeddings"})
    made = [statement for statement in made if not _is_default_of_positions(statement)]
    if len(made) != 5:
        return False
    embed, begin, positions, loop, norm = made
    if not isinstance(loop, ast.For) or loop.orelse or len(loop.body) != 1:
        return False
    return (
        ast.unparse(embed)
        == "if inputs_embeds is None:\n    inputs_embeds = self.embed_tokens(input_ids)"
        and ast.unparse(begin) == "hidden_states = inputs_embeds"
        and ast.unparse(positions) in POSITIONS
        and ast.unparse(loop.iter) in LAYERS
        and _calls_layer(loop.body[0])
        and ast.unparse(norm) == "hidden_states = self.norm(hidden_states)"
        and _returns(base, "last_hidden_state=hidden_states")
    )


def _calls_layer(statement: ast.stmt) -> bool:
    """Whether hidden states become what a layer gives for them and the rotary embedding."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return False
    call = statement.value
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return (
        [*map(ast.unparse, statement.targets)] == ["hidden_states"]
        and ast.unparse(call.func) == "decoder_layer"
        and [*map(ast.unparse, call.args)] == ["hidden_states"]
        and given.get("position_embeddings") == "position_embeddings"
    )


def _is_head_on_base(model: Any) -> bool:
    """Whether logits are the head's, of the rows to keep of the base's output."""
    made = _making(type(model).forward, {"outputs", "hidden_states", "logits"})
    made = [statement for statement in made if not _is_of_training(model, statement)]
    if not made or not _returns(model, "logits=logits"):
        return False
    of_base, *of_head = map(ast.unparse, made)
    return of_base.startswith("outputs = self.model(input_ids=input_ids, ") and of_head in HEADS


def _returns(module: Any, argument: str) -> bool:
    """Whether its forward ends with what is made of this argument, and of others."""
    tree = tree_of(type(module).forward)
    last = None if tree is None else tree.body[-1]
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Call):
        return False
    return argument in [ast.unparse(keyword) for keyword in last.value.keywords]


def _is_of_training(model: Any, statement: ast.stmt) -> bool:
    """Whether it is for a loss: what it is asked for by is never given, and not in the config."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return False
    test = ast.unparse(statement.test)
    if test == "output_router_logits":
        return not getattr(model.config, test, False)
    return test == "labels is not None"


def _is_default_of_positions(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "position_ids is None"


class _Plain(ast.NodeTransformer):
    """Assignments without annotations."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return node
        return ast.Assign(targets=[node.target], value=node.value, lineno=node.lineno)


def _making(forward: Any, names: set[str]) -> list[ast.stmt]:
    """Its statements that give these names or its inputs a value, or may change it where it stands,
    as a method of theirs or a function of them may; none where there is no source to read."""
    tree = tree_of(forward)
    names = names | {"input_ids", "position_ids"}
    made: list[ast.stmt] = []
    for statement in [] if tree is None else tree.body:
        nodes = list(ast.walk(statement))
        stored = [n for n in nodes if isinstance(getattr(n, "ctx", None), ast.Store)]
        calls = [n for n in nodes if isinstance(n, ast.Call)]
        changed = [*stored, *(part for call in calls for part in (call.func, *call.args))]
        if {_root(node) for node in changed} & names:
            made.append(_Plain().visit(statement))
    return made


def _root(node: ast.AST) -> str:
    """Of `x`, `x.y` and `x[0].y`: x."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
