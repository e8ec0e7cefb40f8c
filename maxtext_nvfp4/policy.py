"""Which GEMM of which layer runs in which precision: a pure function of the recipe and the model's sites.

The first of these that applies decides: a protected site stays in high precision; the first rule that
matches the module and the layer and names the GEMM; the first and last layers stay in BF16; the rest is
4-bit. A request of the user's own that decides nothing is an error, never ignored. The rules of a named
preset may find nothing to decide in some models.
"""

import dataclasses
import difflib
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from fnmatch import fnmatchcase

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.plan import BF16, BLOCK, GEMMS, Gemm, GemmPlan, LayerPlan, OperandPlan, Site, SitePlan
from maxtext_nvfp4.recipe import Recipe, Rule, problem, show

type _Decider = int | str | None
"""What decided a GEMM: a rule's index, the key of a layer count, or nothing, which leaves it 4-bit."""

type _Decisions = dict[tuple[Site, int | None], dict[Gemm, _Decider]]
"""By site and layer; the layer is None for a site outside the layer stack. Protected sites are absent."""

_ALL_BF16 = LayerPlan(fprop=BF16, dgrad=BF16, wgrad=BF16)


def resolve(recipe: Recipe, sites: Sequence[Site], num_layers: int) -> tuple[SitePlan, ...]:
    """Decides the precision of every GEMM of every site.

    Args:
      recipe: The complete recipe.
      sites: The model's linear layers.
      num_layers: Decoder layers of the model.

    Returns:
      One plan for each site, in their order. Layers with equal plans but different reasons are separate
      choices.

    Raises:
      ConfigError: The layer counts or the preset leave nothing to quantize, or a key or rule of the user's
        has no effect, or telemetry is asked of layers that the model does not have.
    """
    first, last = (
        _whole_layers(recipe, key, num_layers) for key in ("bf16_first_layers", "bf16_last_layers")
    )
    edges = {
        "bf16_first_layers": range(first),
        "bf16_last_layers": range(num_layers - last, num_layers),
    }
    decisions: _Decisions = {
        (site, layer): {gemm: _decider(recipe, site, layer, gemm, edges) for gemm in GEMMS}
        for site in sites
        if not site.protected
        for layer in site.layers or (None,)
    }
    problems = [
        *_count_problems(recipe, decisions, edges, num_layers),
        *_rule_problems(recipe, sites, decisions, num_layers),
        *_telemetry_problems(recipe, num_layers),
    ]
    plans = tuple(_site_plan(recipe, site, decisions, edges) for site in sites)
    if not problems and decisions and not any(plan.quantized for plan in plans):
        problems += _scope_problems(recipe)
    if problems:
        raise ConfigError("\n".join(problems))
    return plans


def layer_plan(recipe: Recipe) -> LayerPlan:
    """The plan of a linear layer whose three GEMMs are all 4-bit."""
    size = BLOCK[recipe.format]
    in_all, in_wgrad = recipe.hadamard == "all", recipe.hadamard != "none"
    noisy_gradients = recipe.stochastic_rounding != "none"
    noisy_activations = recipe.stochastic_rounding == "gradients_and_activations"
    weight = OperandPlan(block=(size if recipe.weight_scaling == "2d" else 1, size), hadamard=in_all)
    activation = OperandPlan(block=(1, size), hadamard=in_all, stochastic=noisy_activations)
    gradient = OperandPlan(block=(1, size), hadamard=in_all, stochastic=noisy_gradients)
    return LayerPlan(
        fprop=GemmPlan(precision=recipe.format, a=activation, b=weight),
        dgrad=GemmPlan(precision=recipe.format, a=gradient, b=weight),
        wgrad=GemmPlan(
            precision=recipe.format,
            a=dataclasses.replace(activation, hadamard=in_wgrad),
            b=dataclasses.replace(gradient, hadamard=in_wgrad),
        ),
    )


def shortest_name(path: str, paths: Collection[str]) -> str:
    """The shortest tail of `path`, of two parts or more, that names no other path."""
    tails = [tail for tail in reversed(_tails(path)) if "/" in tail]
    return next((tail for tail in tails if sum(_matches(tail, other) for other in paths) == 1), path)


def _tails(path: str) -> list[str]:
    """The path and what follows each of its slashes, longest first."""
    parts = path.split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


def _matches(pattern: str, path: str) -> bool:
    return any(fnmatchcase(tail, pattern) for tail in _tails(path))


def _whole_layers(recipe: Recipe, key: str, num_layers: int) -> int:
    """A layer count in layers: a fraction is rounded up, in decimal, so that 0.1 of 30 is 3."""
    count: int | float = getattr(recipe, key)
    if isinstance(count, float):
        return math.ceil(Decimal(str(count)) * num_layers)
    if count > num_layers:
        why = f"the model has {num_layers} decoder layers"
        raise ConfigError(problem(f"nvfp4.{key}", count, why, f"at most {num_layers}, or a fraction"))
    return count


def _covers(rule: Rule, layer: int | None) -> bool:
    return rule.layers is None or (layer is not None and rule.layers[0] <= layer <= rule.layers[1])


def _decider(
    recipe: Recipe, site: Site, layer: int | None, gemm: Gemm, edges: Mapping[str, range]
) -> _Decider:
    for index, rule in enumerate(recipe.rules):
        if getattr(rule, gemm) and _covers(rule, layer) and _matches(rule.module, site.path):
            return index
    return next((key for key, layers in edges.items() if layer in layers), None)


def _site_plan(recipe: Recipe, site: Site, decisions: _Decisions, edges: Mapping[str, range]) -> SitePlan:
    four_bit = layer_plan(recipe)
    rows = []
    for layer in site.layers or (None,):
        if site.protected:
            rows.append((_ALL_BF16, site.protected))
            continue
        reasons = {
            gemm: _reason(recipe, decider, gemm, edges) for gemm, decider in decisions[site, layer].items()
        }
        plans = {gemm: BF16 if reason else getattr(four_bit, gemm) for gemm, reason in reasons.items()}
        rows.append((LayerPlan(**plans), _joined(reasons)))
    choices = tuple(dict.fromkeys(rows))
    return SitePlan(site=site, choices=choices, table=tuple(choices.index(row) for row in rows))


def _reason(recipe: Recipe, decider: _Decider, gemm: Gemm, edges: Mapping[str, range]) -> str:
    """Why a GEMM stays in BF16; "" if it does not."""
    match decider:
        case int(index):
            rule = recipe.rules[index]
            return _named(index, rule) if getattr(rule, gemm) == "bf16" else ""
        case str(key):
            side, size = key.split("_")[1], len(edges[key])
            where = f"among the {side} {size} layers" if size > 1 else f"the {side} layer"
            return f"{where} ({key}={getattr(recipe, key)})"
        case _:
            return ""


def _named(index: int, rule: Rule) -> str:
    scope = rule.model_dump(include={"module", "layers"}, exclude_none=True)
    return f"rule {index + 1}: " + ", ".join(f"{key}={value}" for key, value in scope.items())


def _joined(reasons: Mapping[Gemm, str]) -> str:
    """One text for the reasons of a layer's GEMMs; it says which GEMM only where they differ."""
    gemms: dict[str, list[str]] = defaultdict(list)
    for gemm, reason in reasons.items():
        if reason:
            gemms[reason].append(gemm)
    if len(gemms) < 2:
        return "".join(gemms)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in gemms.items())


def _count_problems(
    recipe: Recipe, decisions: _Decisions, edges: Mapping[str, range], num_layers: int
) -> Iterator[str]:
    """Layer counts that leave nothing to quantize, and the user's that decide nothing."""
    used = {decider for row in decisions.values() for decider in row.values()}
    if used & edges.keys() and sum(map(len, edges.values())) >= num_layers:
        *_, key = (key for key in edges if edges[key])
        why = f"all decoder layers ({num_layers}) would stay in BF16"
        write = "counts that leave a layer to quantize, or recipe: bf16"
        given = ", ".join(f"{key}: {getattr(recipe, key)}" for key in edges if edges[key])
        yield problem(f"nvfp4.{key}", getattr(recipe, key), f"with {given} {why}", write)
        return
    preset = recipe.preset
    for key, layers in edges.items():
        own = preset is None or getattr(preset, key) != getattr(recipe, key)
        if own and key not in used and any(layer in layers for _, layer in decisions):
            rule = Rule.model_validate(
                {"module": "*", "layers": f"{layers[0]}..{layers[-1]}"} | dict.fromkeys(GEMMS, "bf16")
            )
            why = "the rules of the recipe already choose every GEMM of these layers"
            write = f"0, or put the rule {show(rule.model_dump())} first"
            yield problem(f"nvfp4.{key}", getattr(recipe, key), why, write)


def _own_rules(recipe: Recipe) -> int:
    """How many of the recipe's rules, from the first, are the user's own; the rest are the preset's."""
    preset = recipe.preset
    return len(recipe.rules) - (len(preset.rules) if preset else 0)


def _scope_problems(recipe: Recipe) -> Iterator[str]:
    """A preset that leaves nothing to quantize in this model although it was not made for that."""
    asks_for_4_bit = any("nvfp4" in (rule.fprop, rule.dgrad, rule.wgrad) for rule in recipe.rules)
    spares_all = any(rule.module == "*" and rule.layers is None for rule in recipe.rules)
    if not _own_rules(recipe) and (asks_for_4_bit or not spares_all):
        why = "no module of this model is in its scope, so nothing would be 4-bit"
        yield problem("nvfp4.recipe", recipe.recipe, why, "another preset such as paper, or recipe: bf16")


def _telemetry_problems(recipe: Recipe, num_layers: int) -> Iterator[str]:
    """Layers to measure that the model does not have. One that is in BF16 may be named: twins differ in those."""
    layers = recipe.telemetry.layers if recipe.telemetry else None
    if layers and layers[1] >= num_layers:
        given = f"{layers[0]}..{layers[1]}" if layers[0] != layers[1] else layers[0]
        why = f"the model has {num_layers} decoder layers"
        yield problem("nvfp4.telemetry.layers", given, why, f"0..{num_layers - 1}, or a part of it, or all")


def _rule_problems(
    recipe: Recipe, sites: Sequence[Site], decisions: _Decisions, num_layers: int
) -> Iterator[str]:
    """The user's rules that decide nothing; a preset's rules come after them and need not apply."""
    for index, rule in enumerate(recipe.rules[: _own_rules(recipe)]):
        if fault := _rule_fault(recipe, index, sites, decisions, num_layers):
            given = rule.model_dump(exclude_none=True)
            yield problem(f"nvfp4.rules.{index + 1}", given, *fault)


def _rule_fault(
    recipe: Recipe, index: int, sites: Sequence[Site], decisions: _Decisions, num_layers: int
) -> tuple[str, str] | None:
    """Why a rule decides nothing, or names layers that do not exist, and what to write instead."""
    rule = recipe.rules[index]
    matched = [site for site in sites if _matches(rule.module, site.path)]
    free = [site for site in matched if not site.protected]
    if not matched:
        return "no module of the model matches the pattern", f"module: {_near_misses(rule.module, sites)}"
    if not free:
        if "nvfp4" not in (rule.fprop, rule.dgrad, rule.wgrad):
            return None
        why = ", ".join(sorted({f"{site.path} ({site.protected})" for site in matched}))
        return f"it names only modules that are never quantized: {why}", "bf16, or no such rule"
    if rule.layers:
        present = sorted({layer for site in free for layer in site.layers})
        if not present:
            return "these modules are outside the decoder layers", "the rule without layers"
        if rule.layers[1] >= num_layers or not any(_covers(rule, layer) for layer in present):
            why = f"the model has {num_layers} decoder layers, and these modules are in {_runs(present)}"
            return why, f"layers: {present[0]}..{present[-1]}, or a part of it"
    rows = [row for (site, layer), row in decisions.items() if site in free and _covers(rule, layer)]
    deciders = {row[gemm] for row in rows for gemm in GEMMS if getattr(rule, gemm)}
    if index not in deciders:
        earlier = sorted(decider for decider in deciders if isinstance(decider, int))
        named = " and ".join(_named(i, recipe.rules[i]) for i in earlier)
        return f"it can never apply after {named}", "the narrower rule first, or only one of them"
    return None


def _near_misses(pattern: str, sites: Sequence[Site]) -> str:
    """Patterns like `pattern` that match something; if there are none, some of what could be matched."""
    tails = {tail for site in sites for tail in _tails(site.path)}
    globs = {f"{tail.rpartition('/')[0]}/*" for tail in tails if "/" in tail}
    near = difflib.get_close_matches(pattern, sorted(tails | globs))
    return " or ".join(near or sorted(tail for tail in tails if tail.count("/") == 1)[:8])


def _runs(layers: Sequence[int]) -> str:
    """Layers 0, 1, 2 and 5 as "layers 0..2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return "layers " + ", ".join(f"{a}..{b}" if a != b else f"{a}" for a, b in runs)
