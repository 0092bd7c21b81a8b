import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from wllm_ray.errors import IntegrityError, InvalidInputError
from wllm_ray.probe import load_probe, plot_probe_report, probe_by_layer, save_probe
from wllm_ray.probe.scores import score, wilson_interval

GROUPS, PER_GROUP, WIDTH = 40, 4, 24
ROOT = Path(__file__).parents[2]
SITES = ("embed", "L0_resid_post", "L1_resid_post")
DIGEST = "ab" * 32


class FakeDataset:
    """Label in the last site only; topic in all of them; nothing else but noise."""

    def __init__(self, sites=SITES):
        random = np.random.default_rng(7)
        rows = GROUPS * PER_GROUP
        self.row_ids = [f"row-{number}" for number in range(rows)]
        self.metadata = [
            {
                "label": number % 2,
                "group": f"g{number // PER_GROUP}",
                "topic": "ab"[number // 2 % 2],
            }
            for number in range(rows)
        ]
        label = np.array([row["label"] for row in self.metadata]) * 2.0 - 1
        topic = np.array([row["topic"] == "a" for row in self.metadata]) * 2.0 - 1
        self.values = {site: random.normal(size=(rows, WIDTH)) for site in sites}
        for values in self.values.values():
            values[:, 1] += 6 * topic
        self.values[sites[-1]][:, 0] += 6 * label
        self.manifest = SimpleNamespace(
            dataset_id="fake",
            manifest_sha256=DIGEST,
            sites=sites,
            position="last_prompt",
            model=SimpleNamespace(name="tiny", revision="sha256:" + "12" * 32),
        )

    def site(self, name):
        return self.values[name].astype(np.float32)


@pytest.fixture(scope="module")
def dataset():
    return FakeDataset()


@pytest.fixture(scope="module")
def report(dataset):
    return probe_by_layer(dataset, positive_label="topic")


@pytest.mark.requirement("U-3")
def test_the_label_is_found_where_it_is_and_only_there(report):
    embed, first, last = report.results
    assert last.score.accuracy > 0.95
    assert last.score.low > 0.7
    for result in (embed, first):
        assert result.score.low < report.chance < result.score.high
    assert report.best is last


@pytest.mark.requirement("U-3")
def test_controls_come_with_intervals(report):
    for result in report.results:
        negative, positive = result.negative_control, result.positive_control
        assert negative.low < report.chance < negative.high
        assert positive.low > 0.7
        assert positive.low <= positive.accuracy <= positive.high


@pytest.mark.requirement("U-3")
def test_no_group_is_on_both_sides_of_the_split(dataset, report):
    group = dict(zip(dataset.row_ids, (row["group"] for row in dataset.metadata), strict=True))
    train = {group[row] for row in report.train_ids}
    test = {group[row] for row in report.test_ids}
    assert not train & test
    assert sorted(report.train_ids + report.test_ids) == sorted(dataset.row_ids)


@pytest.mark.requirement("U-3")
def test_test_rows_have_no_influence_on_the_fit(dataset, report):
    changed = FakeDataset()
    test_rows = [dataset.row_ids.index(row) for row in report.test_ids]
    for values in changed.values.values():
        values[test_rows] = 1e6
    for before, after in zip(report.results, probe_by_layer(changed).results, strict=True):
        for name in ("mean", "scale", "weights", "bias"):
            assert np.array_equal(getattr(before.probe, name), getattr(after.probe, name))


@pytest.mark.requirement("U-3")
def test_labels_from_a_mapping_are_aligned_by_row_id(dataset, report):
    names = ("label", "group", "topic")
    ids = list(reversed(dataset.row_ids))
    label, group, topic = (
        {row: dict(zip(dataset.row_ids, dataset.metadata, strict=True))[row][name] for row in ids}
        for name in names
    )
    mapped = probe_by_layer(dataset, label, group, positive_label=topic)
    for one, other in zip(report.results, mapped.results, strict=True):
        assert one.score == other.score
        assert np.array_equal(one.probe.weights, other.probe.weights)


def test_the_same_seed_gives_the_same_report(dataset, report):
    again = probe_by_layer(dataset, positive_label="topic")
    assert again.to_json() == report.to_json()
    assert probe_by_layer(dataset, seed=1).test_ids != report.test_ids


def test_more_than_two_classes(dataset):
    label = {row: ("x", "y", "z")[number % 3] for number, row in enumerate(dataset.row_ids)}
    found = probe_by_layer(dataset, label, sites=["blocks.1.hook_resid_post"])
    probe = found.results[0].probe
    assert probe.classes == ("x", "y", "z")
    assert probe.site == "L1_resid_post"
    assert probe.weights.shape == (3, WIDTH)
    assert set(probe.predict(dataset.site("L1_resid_post"))) <= {"x", "y", "z"}


@pytest.mark.requirement("U-3")
def test_a_saved_probe_predicts_the_same_in_a_fresh_process_without_scikit_learn(
    dataset, report, tmp_path
):
    probe = report.best.probe
    save_probe(probe, tmp_path / "probe")
    features = dataset.site(probe.site)
    np.save(tmp_path / "features.npy", features)
    code = """
import json, sys
import numpy as np
from wllm_ray.probe import load_probe
probe = load_probe(sys.argv[1])
features = np.load(sys.argv[2])
heavy = [name for name in ("ray", "torch", "sklearn", "matplotlib") if name in sys.modules]
logits = probe.logits(features).tolist()
print(json.dumps([probe.manifest_sha256, heavy, probe.predict(features), logits]))
"""
    command = [sys.executable, "-c", code, tmp_path / "probe", tmp_path / "features.npy"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    digest, heavy, predictions, logits = json.loads(done.stdout)
    assert digest == DIGEST
    assert heavy == []
    assert predictions == probe.predict(features)
    assert np.array_equal(np.array(logits), probe.logits(features))


def test_our_logits_are_scikit_learns(dataset, report):
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    probe = report.best.probe
    features = dataset.site(probe.site).astype(np.float64)
    train = [dataset.row_ids.index(row) for row in report.train_ids]
    scaler = StandardScaler().fit(features[train])
    labels = [dataset.metadata[row]["label"] for row in train]
    model = LogisticRegression(C=0.01, max_iter=10_000).fit(
        scaler.transform(features[train]), labels
    )
    expected = model.decision_function(scaler.transform(features))
    logits = probe.logits(features)
    assert np.allclose(logits[:, 1] - logits[:, 0], expected, rtol=1e-9, atol=1e-9)


def test_changed_numbers_are_refused_before_they_are_opened(report, tmp_path):
    save_probe(report.best.probe, tmp_path)
    data = bytearray((tmp_path / "probe.npz").read_bytes())
    data[100] ^= 1
    (tmp_path / "probe.npz").write_bytes(data)
    with pytest.raises(IntegrityError, match=r"is not the file that probe\.json names") as caught:
        load_probe(tmp_path)
    assert caught.value.code == "digest_mismatch"


def test_another_format_and_a_missing_file_are_named(report, tmp_path):
    with pytest.raises(IntegrityError, match=r"probe\.json is not there"):
        load_probe(tmp_path)
    save_probe(report.best.probe, tmp_path)
    document = json.loads((tmp_path / "probe.json").read_text())
    (tmp_path / "probe.json").write_text(json.dumps(document | {"format_version": 2}))
    with pytest.raises(IntegrityError, match=r"version 1, found 'wllm_ray\.probe' version 2"):
        load_probe(tmp_path)


@pytest.mark.requirement("U-4")
def test_a_missing_label_names_the_rows():
    dataset = FakeDataset()
    del dataset.metadata[5]["label"]
    with pytest.raises(InvalidInputError, match=r"no value for 'label'.*1 of 160.*\['row-5'\]"):
        probe_by_layer(dataset)


@pytest.mark.requirement("U-4")
def test_one_class_is_refused():
    dataset = FakeDataset()
    for row in dataset.metadata:
        row["label"] = "same"
    with pytest.raises(
        InvalidInputError, match=r"at least two values of 'label', found \['same'\]"
    ):
        probe_by_layer(dataset)


@pytest.mark.requirement("U-4")
def test_too_few_groups_are_refused():
    dataset = FakeDataset()
    for number, row in enumerate(dataset.metadata):
        row["group"] = number % 3
    with pytest.raises(InvalidInputError, match="at least 6 groups, found 3 in 160 rows"):
        probe_by_layer(dataset)


def test_a_class_in_one_group_only_is_refused():
    dataset = FakeDataset()
    dataset.metadata[0]["label"] = "rare"
    with pytest.raises(
        InvalidInputError, match=r"\['rare'\] occurs in training or test groups only"
    ):
        probe_by_layer(dataset)


def test_true_and_one_are_two_classes():
    dataset = FakeDataset()
    for number, row in enumerate(dataset.metadata):
        row["label"] = True if number % 2 else 1
    assert len(probe_by_layer(dataset).best.probe.classes) == 2


def test_several_vectors_per_row_are_refused():
    dataset = FakeDataset()
    dataset.values["embed"] = np.zeros((500, WIDTH))
    with pytest.raises(InvalidInputError, match="one vector per row: 160 rows, but site embed"):
        probe_by_layer(dataset)


def test_vectors_of_another_width_are_refused(report):
    with pytest.raises(InvalidInputError, match=r"expected vectors of shape \[rows, 24\]"):
        report.best.probe.predict(np.zeros((3, 7)))


def test_a_missing_library_names_the_extra(dataset, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.model_selection", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[probe\]' in a checkout"):
        probe_by_layer(dataset)


def test_wilson_interval_as_in_the_literature():
    # Eight of ten: 0.490 to 0.943 (Newcombe 1998 and every statistics package).
    assert wilson_interval(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


def test_rows_that_agree_within_their_group_count_once():
    groups = np.repeat(np.arange(10), 4)
    whole = score(np.repeat([1, 1, 1, 1, 1, 1, 1, 1, 0, 0], 4).astype(float), groups)
    assert (whole.low, whole.high) == pytest.approx((0.4902, 0.9433), abs=0.02)
    perfect = score(np.ones(40), groups)
    assert (perfect.low, perfect.high) == pytest.approx(wilson_interval(1.0, 10))


def test_the_picture_is_a_png_of_a_readable_size(report, tmp_path):
    plot_probe_report(report, tmp_path / "p.png")
    data = (tmp_path / "p.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1350, 810)


def test_a_label_with_dollars_is_no_formula(report, tmp_path):
    odd = dataclasses.replace(
        report, label=r"$\frac{1}{$", positive_label="a $ and $", model="$x_$"
    )
    plot_probe_report(odd, tmp_path / "p.png")


class Drawn:
    """What is said and shown in a picture, caught as it is saved."""

    def __init__(self, report, path, monkeypatch, **options):
        figures = []
        monkeypatch.setattr(
            "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure)
        )
        plot_probe_report(report, path, **options)
        (figure,) = figures
        (axes,) = figure.axes
        self.title = axes.get_title()
        self.bottom = axes.get_ylim()[0]
        self.notes = [text.get_text() for text in axes.texts]
        self.legend = [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_picture_explains_what_it_shows(report, tmp_path, monkeypatch):
    drawn = Drawn(report, tmp_path / "p.png", monkeypatch)
    assert drawn.title.startswith("Can a linear probe read “label”, layer by layer?\ntiny @ 1212")
    assert drawn.notes == [f"best: L1_resid_post, {report.best.score.accuracy:.2f}"]
    assert "shaded: 95 % interval" in drawn.legend
    assert f"chance for “label” ({report.chance:.2f})" in drawn.legend
    own = f"its own chance {report.positive_chance:.2f}"
    assert f"positive control: probe of “topic” ({own})" in drawn.legend
    asked = Drawn(report, tmp_path / "p.png", monkeypatch, question="True or false?")
    assert asked.title.startswith("True or false?\ntiny @ 1212")


def test_the_vertical_axis_begins_under_all_that_is_drawn(dataset, report, tmp_path, monkeypatch):
    assert 0.2 <= Drawn(report, tmp_path / "p.png", monkeypatch).bottom <= 0.3
    many = {row: "abcdefgh"[number % 8] for number, row in enumerate(dataset.row_ids)}
    low = probe_by_layer(dataset, many)
    least = min(result.negative_control.low for result in low.results)
    bottom = Drawn(low, tmp_path / "p.png", monkeypatch).bottom
    assert 0 <= bottom <= least < 0.2


def test_the_positive_control_has_its_own_chance(dataset):
    topic = {row: "abcd"[number // 2 % 4] for number, row in enumerate(dataset.row_ids)}
    found = probe_by_layer(dataset, positive_label=topic, sites=["embed"])
    assert found.positive_chance == pytest.approx(0.25, abs=0.1)
    assert found.to_json()["positive_chance"] == found.positive_chance
    assert probe_by_layer(dataset, sites=["embed"]).positive_chance is None


def test_several_kinds_and_no_positive_control_can_be_drawn(tmp_path):
    dataset = FakeDataset(("embed", "L0_attn_out", "L0_resid_post", "L1_attn_out", "final_norm"))
    report = probe_by_layer(dataset)
    assert all(result.positive_control is None for result in report.results)
    plot_probe_report(report, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_the_report_as_json_holds_no_arrays(report):
    facts = json.loads(json.dumps(report.to_json()))
    assert facts["best"] == "L1_resid_post"
    assert facts["manifest_sha256"] == DIGEST
    assert facts["sites"]["L1_resid_post"]["score"] == dataclasses.asdict(report.best.score)
