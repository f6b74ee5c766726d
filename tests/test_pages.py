"""The documentation: its code runs, its links resolve, and the names in it exist."""

import importlib
import re
import runpy

from torch_aclnn_ops import ops
from torch_aclnn_ops.integrations._lazy_logits import LazyLogits

import pytest

from benchmarks import _report, errors
from benchmarks._figures import put_between
from benchmarks._results import format_table, read
from tests._language_models import make
from tests._pages import ON_NPU, PAGES, ROOT, anchors, blocks, links, name_of, run, without_code
from tests.test_layout import CANN_NAMES, FUNCTIONS, OPERATORS
from tests.test_nn import DROP_INS

ALL_BLOCKS = [block for page in PAGES for block in blocks(name_of(page))]
RUN = ("python", "pycon", "diff")
SHOWN = ("sh", "text", "yaml", "math", "cpp", "md")
# The page whose blocks are the files of an operator; another test applies it.
TUTORIAL = "docs/add_an_operator.md"
# Tested by test_add_an_operator.py and the host NPU's test_distributed_page.py, test_testing_page.py and
# test_extensions_page.py.
PAGES_OF_FILES = {TUTORIAL, *(f"host-npu/docs/{name}.md" for name in ("distributed", "testing"))}
# Blocks that a test with several processes runs.
ELSEWHERE = "on every rank, after fully_shard"
RUNNING_PAGES = sorted(
    {block.page for block in ALL_BLOCKS if block.language in RUN and block.title != ON_NPU} - PAGES_OF_FILES
)


@pytest.fixture
def group(mesh_of_one):
    return {"group": mesh_of_one.get_group()}


@pytest.fixture
def model_folder(tmp_path):
    make().save_pretrained(tmp_path / "model")
    return {"path": tmp_path / "model"}


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """The working directory of a page whose programs write files."""
    monkeypatch.chdir(tmp_path)
    return {}


# Names that a page may use without defining them.
GIVEN = {
    "docs/integrations.md": ("empty_folder",),
    "docs/operators/linear_cross_entropy.md": ("group",),
    "docs/losses_on_a_head.md": ("group",),
    "docs/migrate.md": ("group", "model_folder"),
}


def _run_page(page, request):
    names = {"__name__": "page"}
    for fixture in GIVEN.get(page, ()):
        names |= request.getfixturevalue(fixture)
    for block in blocks(page):
        if block.language in RUN and block.title not in (ON_NPU, ELSEWHERE):
            run(block, names)
    return names


@pytest.mark.parametrize("page", RUNNING_PAGES)
def test_the_code_of_a_page_runs_as_it_stands(page, request):
    _run_page(page, request)


def test_every_code_block_is_run_or_marked_as_illustration():
    unknown = [(block.page, block.line) for block in ALL_BLOCKS if block.language not in RUN + SHOWN]
    assert not unknown
    titles = {block.title for block in ALL_BLOCKS if block.language in RUN and block.page not in PAGES_OF_FILES}
    assert titles <= {"", ON_NPU, "on every rank", ELSEWHERE}


def test_the_lines_for_hugging_face_train_without_logits_and_save_averages(empty_folder, tmp_path):
    first, *_ = blocks("docs/integrations.md")
    names = {}
    run(first, names)
    assert (tmp_path / "output/checkpoint-2/ema/model.safetensors").exists()
    rows = {name: one[None] for name, one in names["rows"][0].items()}
    assert isinstance(names["model"].train()(**rows).logits, LazyLogits)


def test_the_line_for_lightning_gives_its_trainer_the_callback(request):
    trainer = _run_page("docs/integrations.md", request)["trainer"]
    assert [type(one).__module__ for one in trainer.callbacks].count("torch_aclnn_ops.integrations.lightning") == 1


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_point_to_existing_files_and_headings(page):
    wrong = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_found = target.is_file() and (not anchor or target.suffix != ".md" or anchor in anchors(target))
        wrong += [] if is_found else [link]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_all_rows_of_a_table_have_as_many_cells_as_its_head(page):
    tables = re.findall(r"(?:^\|.*\n)+", without_code(page).replace("\\|", ""), re.MULTILINE)
    assert not [table for table in tables if len({row.count("|") for row in table.splitlines()}) > 1]


def test_every_page_is_in_the_navigation_and_every_entry_of_it_is_a_page():
    listed = set(re.findall(r"(?:^|[ :])([\w/*-]+\.md)(?: +#.*)?$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    patterns = {entry for entry in listed if "*" in entry}
    found = {path.relative_to(ROOT / "docs").as_posix() for each in patterns for path in ROOT.glob(f"docs/{each}")}
    entries = listed - patterns | found
    pages = {name_of(page).removeprefix("docs/") for page in PAGES} - {"README.md"} | {"index.md"}
    assert entries == pages


PUBLIC = ("torch_aclnn_ops", *(f"torch_aclnn_ops.{name}" for name in ("functional", "nn", "ops", "optim"))) + (
    "torch_aclnn_ops.doctor",
    "torch_aclnn_ops.integrations.transformers",
    "torch_aclnn_ops.integrations.lightning",
    "torch_aclnn_ops.integrations.trl",
)


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_lists_every_public_name(module):
    fill = runpy.run_path(str(ROOT / "docs/_tables.py"))["filled"]
    reference = "".join(fill(page.read_text()) for page in ROOT.glob("docs/reference/*.md"))
    missing = [
        name for name in importlib.import_module(module).__all__ if not re.search(rf"(?:\b|`|\.){name}\b", reference)
    ]
    assert not missing


@pytest.mark.parametrize("page, title, text", _report.sections(), ids=lambda one: getattr(one, "name", None))
def test_the_tables_of_a_page_are_made_of_the_measured_files(page, title, text):
    assert put_between(page.read_text(), title, text) == page.read_text()


def test_the_table_of_errors_has_the_largest_of_the_measured_file():
    assert format_table(errors.largest(read(errors.FILE))) in errors.PAGE.read_text()


def test_the_example_of_the_readme_shows_chunks_of_its_rows():
    names = {"__name__": "page"}
    for block in blocks("README.md"):
        if block.language == "python":
            run(block, names)
    [reason] = names["report"].as_dict()["operators"]["linear_cross_entropy"]["reasons"]
    assert int(re.search(r"(\d+) chunks of", reason["reason"])[1]) > 1


def test_the_pages_name_every_function_module_and_operator():
    readme = (ROOT / "README.md").read_text()
    pages = "".join((ROOT / f"docs/operators/{operator}.md").read_text() for operator in OPERATORS)
    assert not [name for name in CANN_NAMES if name not in readme or name not in pages]
    assert not [name for name in ops.__all__ if f"{name}(" not in pages]
    for name in set(FUNCTIONS) - {"fused_ema_adam"} | set(DROP_INS):
        assert f"{name}`" in readme and f"{name}`" in pages, name


def _named(pattern):
    """Return the names in the pages, except in the changelog, which also names removed features."""
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    return sorted({found for page in pages for found in re.findall(pattern, page.read_text())})


@pytest.mark.parametrize("module", _named(r"python -m ((?:benchmarks|tests|torch_aclnn_ops)[\w.]*)"))
def test_a_module_that_a_page_runs_exists(module):
    paths = [project / module.replace(".", "/") for project in (ROOT, ROOT / "host-npu")]
    files = [file for path in paths for file in (path.with_suffix(".py"), path / "__main__.py", path / "__init__.py")]
    assert any(file.exists() for file in files)


def test_every_target_of_make_that_a_page_names_exists():
    targets = set(re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    existing = {target for line in targets for target in line.split()}
    assert existing.issuperset(_named(r"`make ([a-z][\w-]*)"))


def test_every_test_that_a_page_names_exists():
    files = {path: path.read_text() for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("host-npu/tests/*.py")]}
    named = _named(r"`(test_\w+|Test\w+)(?:\.py)?`")
    assert len(named) > 10
    stems = {path.stem for path in files}
    for name in named:
        is_defined = any(re.search(rf"^ *(def|class) {name}\b", text, re.M) for text in files.values())
        assert name in stems or is_defined, name
