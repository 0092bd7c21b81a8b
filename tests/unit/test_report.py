"""The report: its numbers against NumPy, its page against hostile text, and every odd dataset."""

import base64
import dataclasses
import html as html_module
import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from matplotlib.axes import Axes
from typer.testing import CliRunner

from tests.dataset.dataset_builders import MODEL, capture, make_rows, make_spec, rows_of
from wllm_ray.cli import app as wllm
from wllm_ray.dataset.reading.ranged import RangedFile
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.writing.writer import commit_manifest, create_spec, stage_shard
from wllm_ray.digest import canonical_json
from wllm_ray.errors import InvalidInputError, NotFoundError, StorageError
from wllm_ray.probe import probe_by_layer
from wllm_ray.report import make_report
from wllm_ray.report import measure as measuring
from wllm_ray.report.measure import measure
from wllm_ray.report.page import write_page
from wllm_ray.report.probing import probe_sites
from wllm_ray.report.projection import Categories, Scale, colouring, spread
from wllm_ray.report.sample import draw

pytestmark = pytest.mark.requirement("L-4")

SITES = ("embed", "L0_resid_post", "L3_resid_post")
# Shown as text they are harmless; each would do something in a page or a picture that took them.
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }}{% raw %}",
    r"$\frac{1}{$",
    "</style></svg>]]>&amp;<!--",
    "\u202eevil\u202c\x00\x1b[31m\ud83d",
    "行🙂e\u0301",
    "javascript:alert(1)",
)


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "root")


@pytest.fixture
def real_pictures():
    """For the tests that look at the pictures; the others need a tenth of the time without."""


@pytest.fixture(autouse=True)
def _stand_in_pictures(request, monkeypatch):
    if "real_pictures" not in request.fixturenames:
        for name in ("accuracy", "lengths", "norms", "panels", "peaks"):
            monkeypatch.setattr(f"wllm_ray.report.build.draw_{name}", lambda *_: "<svg/>")


def with_metadata(rows, fields):
    return [row._replace(metadata_json=canonical_json(fields(row.index)).decode()) for row in rows]


def write(root, rows, *, features=None, engines=None, **options):
    """A committed dataset of these rows.

    ``features`` is index → [feature rows, widths], and ``engines`` shard → what its differs in.
    """
    store, spec = open_store(root), make_spec(rows, **options)
    create_spec(store, spec)
    for shard in range(len(spec.shards)):
        part = rows_of(spec, rows, shard)
        chunk = capture(part, spec, features=features, **(engines or {}).get(shard, {}))
        stage_shard(store, spec, shard, part, [chunk])
    commit_manifest(store, spec.dataset_id)
    return load_dataset(root, spec.dataset_id)


def random_features(rows, counts, width, seed=3):
    random = np.random.default_rng(seed)
    return {
        row.index: random.normal(size=(count, width)).astype(np.float32)
        for row, count in zip(rows, counts, strict=True)
    }


class Page(HTMLParser):
    """Elements, attributes and text of a page, and whether its tags are balanced."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(html)
        assert self.open == []

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    @property
    def pictures(self):
        sources = [value for tag, name, value in self.attributes if (tag, name) == ("img", "src")]
        head = "data:image/svg+xml;base64,"
        assert all(one.startswith(head) for one in sources)
        return [base64.b64decode(one.removeprefix(head)).decode() for one in sources]

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.texts.append(data)


def section(html, name):
    """What is between the tags of one section of the page."""
    return re.search(rf'<section id="{name}">(.*?)</section>', html, re.DOTALL)[1]


def facts_of(html):
    """Name → value of all tables of facts."""
    found = re.findall(r'<th scope="row">(.*?)</th><td class="text">(.*?)</td>', html)
    facts = {name: html_module.unescape(value) for name, value in found}
    assert len(facts) == len(found)
    return facts


def numbers_of(html):
    """Site → the numbers of its line, as they are shown."""
    lines = re.findall(r"<tr><td><code>(.*?)</code></td>(.*?)</tr>", html)
    return {site: re.findall(r'<td class="n">(.*?)</td>', cells) for site, cells in lines}


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "widths", "layout"),
    [
        ("last_prompt", (5, 5, 5), "stacked"),
        ("last_prompt", (5, 5, 5), "per_site"),
        ("last_prompt", (5, 7, 6), "per_site"),
        ("all_prompt", (5, 5, 5), "stacked"),
    ],
)
def test_norms_and_peaks_are_those_of_numpy(root, monkeypatch, position, widths, layout):
    rows = make_rows(11)
    counts = [1 if position == "last_prompt" else len(row.token_ids) for row in rows]
    features = random_features(rows, counts, sum(widths))
    dataset = write(
        root,
        rows,
        features=features,
        sites=SITES,
        site_widths=widths,
        position=position,
        shard_layout=layout,
    )
    monkeypatch.setattr(measuring, "_BATCH_BYTES", 4 * sum(widths) * 2)
    total = dataset.manifest.feature_rows
    everything = draw(total, total, 0)
    some = draw(total, 4, 0)
    found = measure(dataset, everything, some, SITES[1:2])
    for one, site in zip(found, SITES, strict=True):
        values = np.array(dataset.site(site), np.float64)
        norms = np.linalg.norm(values, axis=1)
        expected = [norms.min(), np.median(norms), norms.mean(), np.percentile(norms, 99)]
        assert [*dataclasses.astuple(one.norms)] == pytest.approx([*expected, norms.max()])
        row, component = np.unravel_index(np.abs(values).argmax(), values.shape)
        peak = one.peak
        assert (peak.feature_row, peak.component) == (row, component)
        assert peak.value == values[row, component]
        assert peak.ratio == pytest.approx(abs(peak.value) / np.median(np.abs(values[row])))
        largest = np.bincount(np.abs(values).argmax(axis=1), minlength=values.shape[1])
        assert [each.share for each in one.common] == sorted(largest / total)[::-1][:3]
        assert all(each.share == largest[each.component] / total for each in one.common)
    assert np.array_equal(found[1].vectors, dataset.site(SITES[1])[some.numbers])
    assert found[0].vectors.shape == (0, widths[0])


def test_a_massive_activation_is_named_with_its_row_and_token(root):
    rows = make_rows(9)
    features = random_features(rows, [len(row.token_ids) for row in rows], 40)
    features[5][1, 17] = -5e4
    dataset = write(root, rows, features=features, site_widths=(40,), position="all_prompt")
    text = Page(make_report(root, "d").html).text
    assert "here at 1 of 1 sites" in text
    assert re.search(rf"-50,000 17 [\d,]+ ● {re.escape(dataset.row_ids[5])} 1 ", text)


def test_norms_of_the_largest_float32_values_do_not_overflow(root):
    rows = make_rows(3)
    features = {index: np.full((1, 4), 3e38, np.float32) for index in range(3)}
    dataset = write(root, rows, features=features)
    (one,) = measure(dataset, draw(3, 3, 0), draw(3, 3, 0), [])
    assert one.norms.most == pytest.approx(6e38)


def test_a_sample_is_sorted_without_repeats_and_the_same_for_a_seed():
    sample = draw(1000, 50, 3)
    assert len(sample) == 50
    assert len(set(sample.numbers.tolist())) == 50
    assert np.array_equal(sample.numbers, np.sort(sample.numbers))
    assert np.array_equal(sample.numbers, draw(1000, 50, 3).numbers)
    assert not np.array_equal(sample.numbers, draw(1000, 50, 4).numbers)
    assert str(sample) == "50 of 1,000"
    assert str(draw(50, 50, 3)) == "all 50"
    parts = [sample.within(start, 300) + start for start in range(0, 1000, 300)]
    assert np.array_equal(np.concatenate(parts), sample.numbers)


def test_panels_are_spread_over_all_sites():
    sites = [f"L{layer}_resid_post" for layer in range(11)]
    chosen = ["L0_resid_post", "L5_resid_post", "L10_resid_post"]
    assert spread(sites, 3) == chosen
    assert spread(chosen, 6) == chosen
    assert spread(["embed", *sites, "L3_attn_out", "final_norm"], 3) == chosen
    assert spread(["embed"], 6) == ["embed"]


def test_values_of_unlike_types_are_unlike_categories():
    found = colouring([1, True, "1", 1.0, None, [1], "1"])
    assert isinstance(found, Categories)
    assert len({found.colours[index] for index in (0, 1, 2, 3, 5)}) == 5
    assert found.colours[2] == found.colours[6]
    assert sorted(count for *_, count in found.legend) == [1, 1, 1, 1, 1, 2]
    assert found.legend[-1][1:] == ("no value", 1)


def test_rare_categories_share_a_colour():
    found = colouring([f"v{number // 2}" for number in range(40)])
    assert found.legend[-1][1:] == ("13 other values", 26)


@pytest.mark.parametrize("odd", [None, 10**400, "text", 1e301])
def test_many_numbers_are_a_scale_unless_one_cannot_be_drawn(odd):
    found = colouring([*range(12), odd])
    assert isinstance(found, Scale if odd is None else Categories)
    if odd is None:
        assert np.isnan(found.numbers).tolist() == [False] * 12 + [True]


# --- what the page shows of them ------------------------------------------------------------------


@pytest.mark.requirement("D-2")
def test_digests_and_provenance_are_those_of_the_manifest(root):
    fingerprint = {"engine_version": "9"}
    dataset = write(root, make_rows(7), per_shard=7, engines={0: fingerprint}, sites=SITES)
    manifest = dataset.manifest
    html = make_report(root, "d").html
    assert facts_of(section(html, "integrity")) == {
        "content digest": manifest.content_sha256,
        "manifest digest": manifest.manifest_sha256,
        "spec digest": manifest.spec_sha256,
    }
    model, tokenizer = manifest.model, manifest.tokenizer
    assert facts_of(section(html, "provenance").partition("<details>")[0]) == {
        "model": model.name,
        "revision": model.revision,
        "asked for as": "main",
        "tokenizer": tokenizer.name,
        "tokenizer revision": tokenizer.revision,
        "chat template": "–",
        "prompts are read by": tokenizer.raw_prompt,
        "messages are read by": tokenizer.chat,
        "position, capture mode": "last_prompt, replay",
        "stored as": "float32 (float32 was asked for), npy, stacked",
        "reproducibility": "bitwise",
        "measured relative L2": "0.0",
    }
    assert model.revision != tokenizer.revision
    fingerprint, versions, selftest = map(
        facts_of, re.findall(r"<details>(.*?)</details>", section(html, "provenance"), re.DOTALL)
    )
    recorded = manifest.fingerprint.model_dump()
    shown = {name: "–" if value is None else str(value) for name, value in recorded.items()}
    assert fingerprint == shown | {"digest": manifest.fingerprint.digest}
    assert recorded["engine_version"] == "9"
    assert versions == manifest.versions
    assert selftest == manifest.selftest.checks


def test_token_counts_are_those_of_the_rows(root, monkeypatch):
    drawn = []
    rows = make_rows(9, failed=[3])
    lengths = [len(row.token_ids) for row in rows if row.failure is None]
    write(root, rows)
    monkeypatch.setattr(
        "wllm_ray.report.build.draw_lengths", lambda one: drawn.append(one) or "<svg/>"
    )
    text = Page(make_report(root, "d").html).text
    average = f"{np.mean(lengths):.4g}"
    assert f"{sum(lengths)} tokens in 8 good rows: 2 to 4 in a row, {average} on average" in text
    assert [one.tolist() for one in drawn] == [lengths]


def test_each_column_of_the_norms_shows_what_its_head_says(root):
    """Of few rows, one of them far off, so that no two of the numbers are near each other."""
    rows = make_rows(7)
    features = random_features(rows, [1] * 7, 12)
    for index, scale in enumerate((1, 2, 4, 8, 16, 32, 5000)):
        features[index] *= scale
    dataset = write(root, rows, features=features, sites=SITES)
    html = section(make_report(root, "d").html, "norms")
    heads = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', html)
    assert heads == ["site", "smallest", "median", "mean", "99th percentile", "largest"]
    found = numbers_of(html)
    assert list(found) == list(SITES)
    for site, shown in found.items():
        norms = np.linalg.norm(np.array(dataset.site(site), np.float64), axis=1)
        expected = [norms.min(), np.median(norms), norms.mean(), np.percentile(norms, 99)]
        numbers = [float(one.replace(",", "")) for one in shown]
        assert numbers == pytest.approx([*expected, norms.max()], rel=1e-3)


@pytest.fixture
def scattered(monkeypatch):
    """x and colours of every cloud of points that is drawn."""
    drawn = []
    real = Axes.scatter

    def scatter(self, x, y, c, **options):
        drawn.append((np.asarray(x), list(c) if not isinstance(c, str) else [c] * len(x)))
        return real(self, x, y, c=c, **options)

    monkeypatch.setattr(Axes, "scatter", scatter)
    return drawn


COLOURED = {
    # Metadata of each row, options, the field that colours, and its legend: value → rows.
    "label": (lambda n: {"label": ("a", "b")[n > 4]}, {}, "label", {"a": 5, "b": 7}),
    "another field": (
        lambda n: {"label": n % 2, "shade": ("x", "y")[n > 2]},
        {"color_by": "shade"},
        "shade",
        {"x": 3, "y": 9},
    ),
    "beside the label of the probes": (
        lambda n: {"truth": n % 2, "shade": ("x", "y")[n > 2]},
        {"label": "truth", "color_by": "shade"},
        "shade",
        {"x": 3, "y": 9},
    ),
    "numbers": (lambda n: {"label": n**2}, {}, "label", {}),
}


@pytest.mark.parametrize("position", ["last_prompt", "index:0,-1"])
@pytest.mark.parametrize("coloured", COLOURED)
def test_each_point_has_the_colour_of_its_own_row(
    root, real_pictures, scattered, coloured, position
):
    fields, options, name, counts = COLOURED[coloured]
    each = 1 if position == "last_prompt" else 2
    # Ever farther apart along one direction, so that the points tell which rows they are.
    features = {n: np.full((each, 4), (n + 1) ** 2, np.float32) for n in range(12)}
    write(root, with_metadata(make_rows(12), fields), features=features, position=position)
    html = make_report(root, "d", **options).html
    assert f"Coloured by {name} ." in Page(html).text
    legend = re.findall(
        r'fill="(.*?)"/></svg><span class="text">(.*?)</span> \((\d+)\)',
        section(html, "projection"),
    )
    assert {value: int(count) for _, value, count in legend} == {
        value: count * each for value, count in counts.items()
    }
    x, colours = next((x, colours) for x, colours in scattered if len(x))
    # Which end is the positive one is the projection's own choice.
    along = x if abs(x.max()) > abs(x.min()) else -x
    meaning = {colour: value for colour, value, _ in legend}
    found = [meaning.get(colours[at], colours[at]) for at in np.argsort(along, kind="stable")]
    assert found == [fields(n)[name] for n in range(12) for _ in range(each)]


# --- odd datasets ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (1, {}),
        (1, {"position": "all_prompt"}),
        (7, {"position": "all_prompt"}),
        (7, {"position": "index:0,-1"}),
        (7, {"position": "mean_prompt"}),
        (7, {"sites": SITES, "site_widths": (4, 1, 6)}),
        (7, {"site_widths": (1,)}),
        (7, {"storage_dtype": "float16", "dtype": "float16", "shard_format": "arrow"}),
    ],
    ids=str,
)
def test_every_kind_of_dataset_gets_a_page(root, options, count, real_pictures):
    write(root, make_rows(count), **options)
    page = Page(make_report(root, "d").html)
    assert f"{count} good rows" in page.text
    for svg in page.pictures:
        ET.fromstring(svg)


def test_a_dataset_in_an_object_store_gets_a_page():
    write("memory://report", make_rows(9), sites=SITES)
    text = Page(make_report("memory://report", "d").html).text
    assert "verified" in text
    assert "9 feature rows" in text


def test_a_dataset_without_good_rows_gets_a_page(root):
    write(root, make_rows(4, failed=range(4)))
    page = Page(make_report(root, "d").html)
    assert "No row has an activation" in page.text
    assert "too_long tokenize 4" in page.text
    assert page.pictures == []


def test_shards_of_engines_that_may_differ_are_named(root):
    engines = {1: {"device": "another device"}, 2: {"device": "another device"}}
    write(root, make_rows(12), engines=engines, mixed_fingerprints=True)
    text = Page(make_report(root, "d").html).text
    assert "reproducibility mixed" in text
    assert "device another device in shards 1, 2" in text


def test_failures_are_counted_by_code_and_listed(root):
    rows = make_rows(60, failed=range(0, 60, 2))
    write(root, rows, per_shard=60)
    text = Page(make_report(root, "d").html).text
    assert "too_long tokenize 30" in text
    assert "Failed rows: the first 20" in text
    assert "200 tokens, the model takes 128" in text


def test_equal_vectors_have_no_principal_components(root):
    write(root, make_rows(5), features={row: np.ones((1, 4), np.float32) for row in range(5)})
    assert (
        "Left out: it takes three feature rows that differ"
        in Page(make_report(root, "d").html).text
    )


def test_the_page_is_a_function_of_the_dataset(root, real_pictures):
    write(root, make_rows(12))
    assert make_report(root, "d").html == make_report(root, "d").html


def test_memory_and_pictures_are_bounded_by_samples(root, monkeypatch):
    rows = make_rows(40)
    write(root, rows, per_shard=9)
    monkeypatch.setattr("wllm_ray.report.build._PICTURE_ROWS", 10)
    monkeypatch.setattr("wllm_ray.report.build._NORM_ROWS", 20)
    text = Page(make_report(root, "d").html).text
    assert "principal components of 10 of 40 feature rows" in text
    assert "99th percentile over 20 of 40" in text


# --- hostile text ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("hostile"))
    rows = make_rows(len(HOSTILE) * 4, failed=[0])
    rows = [
        row._replace(id=f"{HOSTILE[row.index % len(HOSTILE)]}{row.index}".replace("\ud83d", ""))
        for row in rows
    ]
    rows = with_metadata(rows, lambda index: dict.fromkeys(HOSTILE, HOSTILE[index % len(HOSTILE)]))
    name = HOSTILE[0] + HOSTILE[3]
    model = MODEL.model_copy(update={"name": name, "requested_revision": HOSTILE[1]})
    write(root, rows, model=model)
    return make_report(root, "d", label=HOSTILE[1], color_by=HOSTILE[0]).html


@pytest.mark.requirement("L-4")
def test_hostile_text_stays_text(hostile_page, tmp_path):
    page = Page(hostile_page)
    allowed = {
        "html", "head", "meta", "title", "style", "body", "header", "section", "footer", "h1",
        "h2", "p", "span", "ul", "li", "b", "div", "table", "tr", "th", "td", "code", "details",
        "summary", "img", "svg", "circle",
    }  # fmt: skip
    assert set(page.tags) <= allowed
    named = {name for _, name, _ in page.attributes}
    assert named <= {
        "lang", "charset", "http-equiv", "content", "name", "class", "id", "scope", "src", "alt",
        "viewbox", "aria-hidden", "cx", "cy", "r", "fill", "title",
    }  # fmt: skip
    for text in (HOSTILE[0], HOSTILE[1], HOSTILE[2], HOSTILE[3], HOSTILE[7]):
        assert text in page.text
    write_page(tmp_path / "page.html", hostile_page)
    written = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(one.isprintable() or one == "\n" for one in written)
    assert r"\u202eevil\u202c\x00\x1b[31m\ud83d" in written


def test_no_hostile_text_is_drawn(hostile_page):
    for svg in Page(hostile_page).pictures:
        assert not any(text in svg for text in (*HOSTILE, "alert"))
        for element in ET.fromstring(svg).iter():
            assert not element.tag.endswith("script")
            links = [value for name, value in element.attrib.items() if name.endswith("href")]
            assert all(link.startswith(("#", "data:image/png")) for link in links)


def test_the_policy_allows_the_style_sheet_and_nothing_else(hostile_page):
    (policy,) = re.findall(r'Policy" content="([^"]*)"', hostile_page)
    (style,) = re.findall(r"<style>(.*?)</style>", hostile_page, re.DOTALL)
    import hashlib

    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'")
    assert "url(" not in style
    assert "@import" not in style


# --- probes ---------------------------------------------------------------------------------------


def probed(root, fields, *, count=60, **options):
    rows = with_metadata(make_rows(count), fields)
    random = np.random.default_rng(5)
    features = {index: random.normal(size=(1, 8)) for index in range(count)}
    for index, row in features.items():
        row[0, 4] = 9.0 if index % 2 else -9.0
    sites = ("L0_resid_post", "L1_resid_post")
    return write(
        root, rows, features=features, sites=sites, site_widths=(4, 4), per_shard=25, **options
    )


def test_the_probe_finds_a_planted_label_as_the_library_does(root):
    fields = lambda index: {"truth": index % 2, "group": f"g{index // 3}"}  # noqa: E731
    dataset = probed(root, fields)
    text = Page(make_report(root, "d", label="truth").html).text
    best = probe_by_layer(dataset, "truth").best
    assert best.probe.site == "L1_resid_post"
    assert f"Best: L1_resid_post , {best.score.accuracy:.3f}" in text
    assert "those of the metadata field group" in text


def test_rows_without_groups_are_each_their_own(root):
    probed(root, lambda index: {"label": index % 2}, count=240)
    text = Page(make_report(root, "d").html).text
    assert "each is its own" in text
    assert "Best: L1_resid_post , 1.000" in text


def test_probes_of_many_rows_use_some_of_them(root, monkeypatch):
    monkeypatch.setattr("wllm_ray.report.probing._MOST_ROWS", 40)
    probed(root, lambda index: {"label": index % 2})
    assert "(40 of 60 good rows)" in Page(make_report(root, "d").html).text


@pytest.mark.parametrize(
    ("fields", "count", "reason"),
    [
        (lambda _: {}, 30, "no metadata field is called label"),
        (lambda _: {"label": "a"}, 30, "at least two values"),
        (lambda index: {"label": index % 2}, 4, "at least 6 groups"),
        (lambda index: {"label": index}, 30, "30 different values"),
        (lambda index: {"label": index % 2} if index < 4 else {}, 30, "at least 6 groups"),
        (lambda index: {"label": index % 2} if index < 4 else {}, 30, "4 of 30 good rows have"),
        (lambda index: {"label": index % 2 / 4}, 30, "a string, an integer or a boolean"),
    ],
)
def test_where_there_is_no_probe_the_page_says_why(root, fields, count, reason):
    probed(root, fields, count=count)
    text = Page(make_report(root, "d").html).text
    assert reason in text[text.index("Probe accuracy by layer Left out:") :]


def test_rows_without_a_label_are_left_out_and_counted(root):
    fields = lambda index: {"label": index % 2} if index < 200 else {"label": None}  # noqa: E731
    probed(root, fields, count=240)
    text = Page(make_report(root, "d").html).text
    assert "Best: L1_resid_post , 1.000" in text
    assert "(all 200 labelled rows)" in text
    assert "200 of 240 good rows have a label" in text


def test_rows_without_a_group_are_each_their_own_beside_those_with_one(root):
    fields = lambda index: {"label": index % 2} | ({"group": [1]} if index < 20 else {})  # noqa: E731
    dataset = probed(root, fields, count=60)
    found = probe_sites(dataset, "label", 0)
    assert found.grouped == 20
    together = set(dataset.row_ids[:20])
    assert together <= set(found.found.train_ids) or together <= set(found.found.test_ids)
    assert "40 of these rows have none" in Page(make_report(root, "d").html).text


@pytest.mark.parametrize("fits", [True, False])
def test_stacked_sites_of_the_probes_rows_are_fetched_once_where_they_fit(monkeypatch, fits):
    fields = lambda index: {"label": index % 2}  # noqa: E731
    probed("memory://probes", fields, count=240, dataset_id=f"d{fits}")
    # Nothing that was fetched is kept, as of a dataset too large for it.
    monkeypatch.setattr("wllm_ray.dataset.reading.files.KEPT_BYTES", 0)
    if not fits:
        monkeypatch.setattr("wllm_ray.report.probing._READ_ONCE_BYTES", 0)
    fetched = []
    pick = RangedFile.pick
    monkeypatch.setattr(
        RangedFile, "pick", lambda self, *wanted: fetched.append(self.key) or pick(self, *wanted)
    )
    dataset = load_dataset("memory://probes", f"d{fits}", verify="off")
    assert probe_sites(dataset, "label", 0).found.best.probe.site == "L1_resid_post"
    assert len(fetched) == len(dataset.manifest.shards) * (1 if fits else 2)


def test_ragged_rows_have_no_probe(root):
    write(root, make_rows(30), position="all_prompt")
    assert "keeps several vectors of a row" in Page(make_report(root, "d").html).text


@pytest.mark.parametrize("option", ["label", "color_by"])
def test_a_field_that_no_row_has_is_refused(root, option):
    write(root, make_rows(5))
    with pytest.raises(
        InvalidInputError, match=r"no good row has a metadata field 'lable'.*'label'"
    ):
        make_report(root, "d", **{option: "lable"})


# --- damage and the command line ------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(wllm, ["report", *map(str, arguments)])


def test_the_command_writes_the_page(root, tmp_path):
    write(root, make_rows(8))
    output = tmp_path / "page.html"
    output.write_text("the page of yesterday")
    result = run(f"{root}/datasets/d", "--output", output)
    assert (result.exit_code, result.stdout) == (0, f"{output}\n")
    assert "verified" in Page(output.read_text(encoding="utf-8")).text


@pytest.mark.parametrize("address", ["s3://bucket/page.html", "file:///tmp/page.html"])
def test_an_address_is_no_place_for_the_page(root, tmp_path, monkeypatch, address):
    write(root, make_rows(8))
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    result = run(root, "d", "--output", address)
    assert result.exit_code == 2
    assert "a local file is needed" in result.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.requirement("D-5")
def test_a_damaged_dataset_gets_a_page_of_faults_and_no_features(root, tmp_path):
    dataset = write(root, make_rows(8))
    name = dataset.manifest.shards[1].features_files[0].name
    path = tmp_path / "root/datasets/d" / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = run(root, "d", "--output", tmp_path / "page.html")
    assert result.exit_code == 2
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "damaged: do not use" in page.text
    assert f"{name} digest_mismatch" in page.text
    assert page.pictures == []


def test_a_dataset_that_is_not_there_has_no_page(root, tmp_path):
    with pytest.raises(NotFoundError):
        make_report(root, "d")
    result = run(root, "d", "--output", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "no committed dataset 'd'" in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_codes_and_tiles_break_in_no_word(root, tmp_path):
    dataset = write(root, make_rows(8))
    path = tmp_path / "root/datasets/d" / dataset.manifest.shards[0].features_files[0].name
    path.write_bytes(path.read_bytes()[:-1])
    html = make_report(root, "d").html
    assert '<table class="faults">' in html
    rules = dict(re.findall(r"^([^{}]+?) \{ ([^{}]*) \}$", html, re.MULTILINE))
    assert "white-space: nowrap" in rules[".faults .text, td code"]
    # A tile is as wide as what is in it.
    assert "flex: 1 1 auto" in rules[".cards li"]


def test_a_missing_package_names_the_extra(root, tmp_path, monkeypatch):
    write(root, make_rows(8))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = run(root, "d", "--output", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "pip install '.[probe]' in a checkout" in result.stderr


def test_a_page_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    with pytest.raises(StorageError, match=r"cannot write .*/no/page\.html: No such file"):
        write_page(tmp_path / "no/page.html", "")
