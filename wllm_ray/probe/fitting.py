"""Fitting and scoring: one probe per hook site, with two controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.format.manifest import Manifest
from wllm_ray.digest import canonical_json
from wllm_ray.errors import InvalidInputError
from wllm_ray.extras import require_extra
from wllm_ray.probe.saved import Probe
from wllm_ray.probe.scores import Score, score
from wllm_ray.sites import HookSite, parse_site

__all__ = ["LabelledDataset", "ProbeReport", "SiteResult", "probe_by_layer"]

Field: TypeAlias = str | Mapping[str, Any]
Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

# Under this many groups a third of them says nothing about new ones.
_MIN_GROUPS = 6
# Rows named in an error message; the details hold all.
_LISTED = 5


class LabelledDataset(Protocol):
    """What a probe needs of an :class:`~wllm_ray.dataset.reading.reader.ActivationDataset`."""

    @property
    def row_ids(self) -> Sequence[str]:
        """The ids of the good rows, in order."""

    @property
    def metadata(self) -> Sequence[Mapping[str, Any]]:
        """Their metadata, in the same order."""

    @property
    def manifest(self) -> Manifest:
        """The manifest."""

    def site(self, name: str) -> NDArray[Any]:
        """The vectors of one hook site, in the same order."""


@dataclass(frozen=True, slots=True, eq=False)
class SiteResult:
    """What was found at one hook site."""

    probe: Probe
    score: Score
    negative_control: Score
    positive_control: Score | None

    @property
    def site(self) -> HookSite:
        """The hook site."""
        return parse_site(self.probe.site)


@dataclass(frozen=True, slots=True, eq=False)
class ProbeReport:
    """The result of :func:`probe_by_layer`, one entry per site in the dataset's order.

    ``chance`` is the test accuracy of always answering the most common training label, and
    ``positive_chance`` the same for the positive control, which has classes of its own.
    """

    dataset_id: str
    manifest_sha256: str
    model: str
    revision: str
    label: str
    positive_label: str | None
    seed: int
    rows: int
    train_ids: tuple[str, ...]
    test_ids: tuple[str, ...]
    chance: float
    positive_chance: float | None
    results: tuple[SiteResult, ...]

    @property
    def best(self) -> SiteResult:
        """The site that scored highest on the test rows, so its own score flatters it a little."""
        return max(self.results, key=lambda result: result.score.accuracy)

    def to_json(self) -> dict[str, Any]:
        """Everything but the fitted numbers, for a file."""
        names = ("dataset_id", "manifest_sha256", "model", "revision", "label", "positive_label")
        numbers = ("seed", "rows", "chance", "positive_chance")
        facts = {name: getattr(self, name) for name in (*names, *numbers)}
        sites = {
            result.probe.site: {
                "score": asdict(result.score),
                "negative_control": asdict(result.negative_control),
                "positive_control": result.positive_control and asdict(result.positive_control),
            }
            for result in self.results
        }
        return {**facts, "train_rows": len(self.train_ids), "best": self.best.probe.site} | {
            "test_ids": list(self.test_ids),
            "sites": sites,
        }


@dataclass(frozen=True, slots=True)
class _Labels:
    """A field of every row as class numbers, in the dataset's row order."""

    name: str
    classes: tuple[Any, ...]
    codes: Ints


@dataclass(frozen=True, slots=True)
class _Split:
    """Which rows train and which test; ``groups`` are the test rows' group numbers."""

    train: Ints
    test: Ints
    groups: Ints


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is fitted and scored at every site."""

    labels: _Labels
    shuffled: _Labels
    positive: _Labels | None
    split: _Split
    regularisation: float


def probe_by_layer(
    dataset: LabelledDataset,
    label: Field = "label",
    group: Field = "group",
    *,
    sites: Sequence[str] | None = None,
    positive_label: Field | None = None,
    test_fraction: float = 0.3,
    regularisation: float = 0.01,
    seed: int = 0,
) -> ProbeReport:
    """Fit and score one probe per hook site.

    Args:
        dataset: A dataset with one vector per row (position ``last_prompt``, ``mean_prompt``, …).
        label: The metadata field to predict, or a mapping from row id to its value. Values are
            classes: strings, integers, booleans.
        group: The metadata field, or mapping from row id, whose rows must stay together: a
            statement and its negation, the turns of one conversation.
        sites: Hook sites by name; all of the dataset's where omitted.
        positive_label: A field or mapping that is known to be easy to predict, as a control.
        test_fraction: How much of the groups is kept from training.
        regularisation: scikit-learn's ``C``. The default is strong on purpose: there are usually
            more dimensions than rows.
        seed: Of the split and of the shuffled control. The same seed gives the same report.

    Raises:
        InvalidInputError: A label or group is missing, there are fewer than two classes or too
            few groups, a class is on one side of the split only, or rows have several vectors.
        ModuleNotFoundError: scikit-learn is not installed.
    """
    labels = _labels(dataset, label, "label")
    split = _split(_labels(dataset, group, "group"), test_fraction, seed)
    _check_classes(labels, split)
    positive = None if positive_label is None else _labels(dataset, positive_label, "control")
    plan = _Plan(labels, _shuffled(labels, split, seed), positive, split, regularisation)
    manifest = dataset.manifest
    ids = list(dataset.row_ids)
    return ProbeReport(
        dataset_id=manifest.dataset_id,
        manifest_sha256=manifest.manifest_sha256,
        model=manifest.model.name,
        revision=manifest.model.revision,
        label=labels.name,
        positive_label=None if positive is None else positive.name,
        seed=seed,
        rows=len(ids),
        train_ids=tuple(ids[row] for row in split.train),
        test_ids=tuple(ids[row] for row in split.test),
        chance=_chance(labels, split),
        positive_chance=None if positive is None else _chance(positive, split),
        results=tuple(
            _examine(dataset, str(parse_site(name)), plan) for name in sites or manifest.sites
        ),
    )


def _labels(dataset: LabelledDataset, field: Field, name: str) -> _Labels:
    """One value per row, found by row id in a mapping or by name in the metadata."""
    if isinstance(field, str):
        name = field
        found = [row.get(field) for row in dataset.metadata]
        where = f"the metadata has no value for {field!r}"
    else:
        found = [field.get(row_id) for row_id in dataset.row_ids]
        where = f"the {name} mapping has no value"
    missing = [
        row_id
        for row_id, value in zip(dataset.row_ids, found, strict=True)
        if not isinstance(value, (str, int, bool))
    ]
    if missing:
        raise InvalidInputError(
            f"{where} that is a string, an integer or a boolean in {len(missing)} of "
            f"{len(found)} rows, beginning with {missing[:_LISTED]}; pass a mapping from row id to "
            f"value for all rows",
            code="invalid_argument",
            details={"rows": missing},
        )
    # By canonical text, since 1 and True are equal to Python but are two values in JSON.
    texts = [canonical_json(value) for value in found]
    values = dict(zip(texts, found, strict=True))
    order = {text: number for number, text in enumerate(sorted(values))}
    codes = np.array([order[text] for text in texts], dtype=np.int64)
    return _Labels(name, tuple(values[text] for text in order), codes)


def _split(groups: _Labels, test_fraction: float, seed: int) -> _Split:
    if len(groups.classes) < _MIN_GROUPS:
        raise InvalidInputError(
            f"a split by {groups.name!r} needs at least {_MIN_GROUPS} groups, found "
            f"{len(groups.classes)} in {len(groups.codes)} rows; give every independent row a "
            f"group of its own",
            code="invalid_argument",
        )
    splitter = require_extra("sklearn.model_selection").GroupShuffleSplit(
        n_splits=1, test_size=test_fraction, random_state=seed
    )
    train, test = next(splitter.split(groups.codes, groups=groups.codes))
    return _Split(train=train, test=test, groups=groups.codes[test])


def _check_classes(labels: _Labels, split: _Split) -> None:
    if len(labels.classes) < 2:  # noqa: PLR2004 (a choice needs two)
        raise InvalidInputError(
            f"expected at least two values of {labels.name!r}, found {list(labels.classes)}",
            code="invalid_argument",
        )
    sides = set(labels.codes[split.train]) ^ set(labels.codes[split.test])
    if sides:
        lonely = [labels.classes[code] for code in sorted(sides)]
        raise InvalidInputError(
            f"{labels.name!r} = {lonely[:_LISTED]} occurs in training or test groups only; use "
            f"another seed, more groups, or fewer classes",
            code="invalid_argument",
        )


def _features(dataset: LabelledDataset, name: str) -> Floats:
    features = dataset.site(name)
    if features.shape[:1] != (len(dataset.row_ids),) or features.ndim != 2:  # noqa: PLR2004 (axes)
        raise InvalidInputError(
            f"a probe needs one vector per row: {len(dataset.row_ids)} rows, but site {name} has "
            f"shape {list(features.shape)} (position {dataset.manifest.position!r}); capture with "
            f"last_prompt, first or mean_prompt",
            code="invalid_argument",
        )
    return features.astype(np.float64)


def _shuffled(labels: _Labels, split: _Split, seed: int) -> _Labels:
    """The labels with those of the training rows dealt out anew."""
    codes = labels.codes.copy()
    codes[split.train] = np.random.default_rng(seed).permutation(codes[split.train])
    return _Labels(labels.name, labels.classes, codes)


def _examine(dataset: LabelledDataset, name: str, plan: _Plan) -> SiteResult:
    """Fit the label and both controls at one site, each standardised on the training rows."""
    features = _features(dataset, name)
    train = plan.split.train
    mean = features[train].mean(axis=0)
    deviation = features[train].std(axis=0)
    scale = np.where(deviation > 0, deviation, 1.0)

    def fit(wanted: _Labels) -> Probe:
        codes = wanted.codes[train]
        kept, weights, bias = _regress((features[train] - mean) / scale, codes, plan)
        return Probe(
            site=name,
            label=wanted.name,
            classes=tuple(wanted.classes[code] for code in kept),
            dataset_id=dataset.manifest.dataset_id,
            manifest_sha256=dataset.manifest.manifest_sha256,
            mean=mean,
            scale=scale,
            weights=weights,
            bias=bias,
        )

    probe = fit(plan.labels)
    positive = plan.positive
    return SiteResult(
        probe=probe,
        score=_score(probe, features, plan.labels, plan.split),
        negative_control=_score(fit(plan.shuffled), features, plan.labels, plan.split),
        positive_control=(
            None if positive is None else _score(fit(positive), features, positive, plan.split)
        ),
    )


def _regress(features: Floats, codes: Ints, plan: _Plan) -> tuple[Ints, Floats, Floats]:
    """The classes seen in training, and weights and bias for each of them."""
    linear = require_extra("sklearn.linear_model")
    model = linear.LogisticRegression(C=plan.regularisation, max_iter=10_000)
    model.fit(features, codes)
    weights, bias = model.coef_, model.intercept_
    if len(model.classes_) == 2:  # noqa: PLR2004 (scikit-learn then keeps the second class only)
        weights, bias = (np.concatenate([0 * one, one]) for one in (weights, bias))
    return model.classes_, weights, bias


def _score(probe: Probe, features: Floats, labels: _Labels, split: _Split) -> Score:
    predicted = probe.predict(features[split.test])
    wanted = [labels.classes[code] for code in labels.codes[split.test]]
    right = [one == other for one, other in zip(predicted, wanted, strict=True)]
    return score(np.array(right, dtype=np.float64), split.groups)


def _chance(labels: _Labels, split: _Split) -> float:
    common = np.bincount(labels.codes[split.train]).argmax()
    return float((labels.codes[split.test] == common).mean())
