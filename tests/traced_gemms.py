"""Which 4-bit GEMMs a traced train step runs, found in its jaxpr, and which `explain` lists."""

from collections import Counter

import jax
import numpy as np
from jax import numpy as jnp
from maxtext_models import abstract_model

from maxtext_nvfp4.integration.attach import LayerIndex
from maxtext_nvfp4.integration.report import of_config
from maxtext_nvfp4.integration.sites import find_linears, to_sites
from maxtext_nvfp4.plan import GEMMS

UNKNOWN = None
"""Stands for a value that the walk does not know."""

_LARGEST = 64
"""Elements of the largest array that the walk keeps."""


class Walk:
    """Runs a jaxpr as far as its branches need, and counts the 4-bit GEMMs on the way.

    A scan's body is walked once for every iteration, with the values of small integer inputs, so that the table
    lookup in front of each `lax.switch` gives the branch that this layer takes. A branch on anything else that holds
    a 4-bit GEMM is an error, not a guess.

    Attributes:
      gemms: How often each (kind of GEMM, operand sizes, iterations of the enclosing scans) was run. Kinds are
        fprop, dgrad, wgrad, and replay: an fprop that rematerialization runs again in the backward pass.
    """

    def __init__(self):
        self.gemms = Counter()

    def kind(self, equation):
        """What an equation is counted as; "" where it is not counted."""
        return four_bit(equation)

    def run(self, jaxpr, arguments, where=(), replaying=False):
        """Walks a jaxpr with these inputs, UNKNOWN where not known; returns its outputs."""
        env = dict(zip(jaxpr.constvars, map(kept, jaxpr.consts), strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom):
            return kept(atom.val) if hasattr(atom, "val") else env.get(atom, UNKNOWN)

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            outputs = self._equation(equation, inputs, where, replaying)
            env.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation, inputs, where, replaying):
        name, params = equation.primitive.name, equation.params
        if kind := self.kind(equation):
            operands = sizes(atom.aval.shape for atom in equation.invars[:2])
            self.gemms["replay" if replaying and kind == "fprop" else kind, operands, where] += 1
            return [UNKNOWN] * len(equation.outvars)
        if name == "scan":
            return self._scan(params, inputs, where, replaying)
        if name == "cond":
            index, *operands = inputs
            if index is not UNKNOWN:
                return self.run(params["branches"][int(index)], operands, where, replaying)
            assert not any(map(self._counts, params["branches"])), "a branch that the walk cannot decide"
            return [UNKNOWN] * len(equation.outvars)
        if name == "while":
            assert not self._counts(params["body_jaxpr"])
            return [UNKNOWN] * len(equation.outvars)
        body = params.get("jaxpr", params.get("call_jaxpr"))
        if body is None:
            return self._evaluate(equation, inputs)
        if len(body.invars) != len(inputs):  # a kernel
            assert not self._counts(body)
            return [UNKNOWN] * len(equation.outvars)
        backward = name.startswith("remat") and params["differentiated"]
        return self.run(body, inputs, where, replaying or backward)

    def _counts(self, jaxpr):
        return any(map(self.kind, equations(jaxpr)))

    def _scan(self, params, inputs, where, replaying):
        constants, carry_size, _ = map(len, params["ft_in"].unpack())
        fixed, carry = inputs[:constants], inputs[constants : constants + carry_size]
        stacked = inputs[constants + carry_size :]
        rows = {}
        order = range(params["length"])
        for i in reversed(order) if params["reverse"] else order:
            row = [UNKNOWN if xs is UNKNOWN else xs[i] for xs in stacked]
            outputs = self.run(params["jaxpr"], [*fixed, *carry, *row], (*where, i), replaying)
            carry, rows[i] = outputs[:carry_size], outputs[carry_size:]
        columns = zip(*(rows[i] for i in order), strict=True)
        return [*carry, *(UNKNOWN if any(v is UNKNOWN for v in c) else kept(np.stack(c)) for c in columns)]

    @staticmethod
    def _evaluate(equation, inputs):
        small = all(
            v.aval.size <= _LARGEST and v.aval.dtype in (np.int32, np.bool_) for v in equation.outvars
        )
        if not small or any(value is UNKNOWN for value in inputs):
            return [UNKNOWN] * len(equation.outvars)
        outputs = equation.primitive.bind(*map(jnp.asarray, inputs), **equation.params)
        return list(map(np.asarray, outputs if equation.primitive.multiple_results else [outputs]))


def kept(value):
    """The value itself if it is a small array of integers, such as a layer number or a table; else UNKNOWN."""
    integer = getattr(value, "dtype", np.asarray(value).dtype).kind in "iub"
    return np.asarray(value) if integer and np.ndim(value) <= 1 and np.size(value) <= _LARGEST else UNKNOWN


def equations(jaxpr):
    """All equations of a jaxpr, branches and loop bodies included."""
    for equation in jaxpr.eqns:
        yield equation
        for key in ("branches", "body_jaxpr", "jaxpr", "call_jaxpr"):
            inner = equation.params.get(key)
            for body in inner if isinstance(inner, tuple) else [inner] if inner is not None else []:
                yield from equations(body)


def four_bit(equation):
    """Which of fprop, dgrad and wgrad an equation is, if it multiplies two 4-bit operands; "" otherwise.

    Backend xla types its operands, which cannot be mistaken. The emulation is known by its named scope.
    """
    types = [getattr(atom.aval, "dtype", None) for atom in equation.invars]
    scopes = [part.name for part in equation.source_info.name_stack.stack if hasattr(part, "name")]
    kinds = [scope.removeprefix("nvfp4_") for scope in scopes if scope.startswith("nvfp4_")]
    if types.count(jnp.float4_e2m1fn) == 2 or (equation.primitive.name == "dot_general" and kinds):
        (kind,) = kinds
        assert kind in GEMMS
        return kind
    return ""


def sizes(shapes):
    """Operand shapes, whichever of its two axes comes first: a backend may lay an operand out transposed."""
    return tuple(tuple(sorted(shape)) for shape in shapes)


def walked(trainer, evaluation=False, walk=None):
    """The 4-bit GEMMs of MaxText's traced step, with the layer numbers of the real model."""
    walk = walk or Walk()
    jaxpr = trainer.trace(evaluation).jaxpr
    numbers = trainer.constants(LayerIndex)
    inputs = [
        *(numbers.get(path) for path in trainer.paths),
        *jax.tree.map(lambda _: UNKNOWN, trainer.shapes[1]),
    ]
    assert sum(value is not UNKNOWN for value in inputs) == len(numbers)
    walk.run(jaxpr, inputs)
    return walk.gemms


def listed(config):
    """What `explain` lists for a step, as (kind of GEMM, operand sizes) to a count."""
    tokens = config.micro_batch_size_to_train_on * config.max_target_length
    report = of_config(config)
    found = {site.path: site for site in to_sites(find_linears(abstract_model(config)))}
    assert report.gemms == len(GEMMS) * sum(max(1, len(site.layers)) for site in found.values())
    gemms = Counter()
    for row in report.rows:
        first, _, last = row.layers.partition("..")
        layers = 1 if first == "-" else int(last or first) - int(first) + 1
        k, n = found[row.path].k, found[row.path].n
        x, w, dy = (tokens, k), (k, n), (tokens, n)
        for kind, operands in zip(GEMMS, ((x, w), (dy, w), (x, dy)), strict=True):
            if getattr(row.plan, kind).quantized:
                gemms[kind, sizes(operands)] += layers
    assert gemms.total() == report.nvfp4_gemms
    return gemms


def merged(gemms, kinds=GEMMS):
    """Counts by kind and operand sizes, over all iterations."""
    total = Counter()
    for (kind, operands, _), count in gemms.items():
        if kind in kinds:
            total[kind, operands] += count
    return total
