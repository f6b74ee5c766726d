"""The page of messages: it has all of the sources, each with a cause and a cure, and is what its program writes."""

import re

import pytest

from tests._causes import SECTIONS, Cause
from tests._messages import ROOT, Message, collect, messages_of_cpp, messages_of_python
from tests.what_can_go_wrong import PAGE, assign, page

MESSAGES = collect()
WRITE = "run `python -m tests.what_can_go_wrong`"

# Sentences in C++ that no program prints: docstrings, schemas, what the compiler says, names of what is queued.
NO_MESSAGE = re.compile(
    r"Tensor|NO AVX|CANN's operators on npu|Operators and autograd|Make a short|Set the functions|chip, takes"
    r"|Check values|Say for each|Return how|Return CANN's|Call the operator on|has another signature"
    r"|takes another type|pinned host memory|mmap of|of an event|for an event|kernels in device"
)


def test_every_message_has_one_cause_and_every_cause_a_message() -> None:
    assert assign(MESSAGES, SECTIONS)[1] == []


def test_the_page_is_what_its_program_writes() -> None:
    assert PAGE.read_text() == page(assign(MESSAGES, SECTIONS)[0], SECTIONS), WRITE


def test_a_message_without_a_cause_is_named() -> None:
    wrong = assign([*MESSAGES, Message("the moon is full", "torch_aclnn_ops/nn.py")], SECTIONS)[1]
    assert "no cause in tests/_causes.py has words of torch_aclnn_ops/nn.py: the moon is full" in wrong


def test_words_that_no_message_has_any_more_are_named() -> None:
    without = [message for message in MESSAGES if "amsgrad" not in message.text]
    assert "no message needs the words 'has amsgrad=True'" in assign(without, SECTIONS)[1]


def test_a_message_belongs_to_the_cause_with_the_longest_words_in_its_folder() -> None:
    general, special, elsewhere = (
        Cause(("dtype",), "", ""),
        Cause(("must have dtype",), "", ""),
        Cause(("",), "", "", "b/"),
    )
    sections = {"section": [general, special, elsewhere]}
    messages = [Message("x must have dtype y", "a/x"), Message("no dtype", "a/x"), Message("other", "b/x")]
    found, wrong = assign(messages, sections)
    assert (found, wrong) == ({general: ["no dtype"], special: ["x must have dtype y"], elsewhere: ["other"]}, [])


def test_a_message_that_fits_two_causes_is_named() -> None:
    sections = {"section": [Cause(("full",), "a", ""), Cause(("moon",), "b", "")]}
    assert "two causes have words of x: full moon" in assign([Message("full moon", "x")], sections)[1]


@pytest.mark.parametrize(
    "source, expected",
    [
        (
            'raise ValueError(f"{_NAME}: n must be {accepted}, but it is {list(t.shape)}")',
            "f: n must be {accepted}, but it is {shape}",
        ),
        ('raise ValueError("one" f" {a[0]}" + " two") from None', "one {…} two"),
        ('raise _error("x")\ndef _error(r):\n    return OSError(f"no file{r}")', "no file{r}"),
        ('warnings.warn(f"old {name!r}", stacklevel=2)', "old {name}"),
        ('_log.warning("old thing")', "old thing"),
        ('add_note(error, self._describe())\ndef _describe(): return f"{n} left"', "{n} left"),
        ('def why() -> str | None:\n    return None if fine else f"it is {bad}"', "it is {bad}"),
        ('reason = f"{x} is old" if x else None', "{x} is old"),
        ("""raise ValueError(f"{'a b' if x else _NAME} is wrong")""", "{a b / f} is wrong"),
    ],
)
def test_what_python_raises_warns_or_returns_as_a_reason_is_a_message(source: str, expected: str) -> None:
    assert expected in list(messages_of_python(f'_NAME = "f"\n{source}'))


@pytest.mark.parametrize(
    "source, expected",
    [
        (
            'TORCH_CHECK(a && f(b), name, ": it is on ", device,\n  " (not "\n  "here)");',
            "{name}: it is on {device} (not here)",
        ),
        ('throw Error(ACL_ERROR, std::string("it has ") + std::to_string(size_) + " bytes");', "it has {size} bytes"),
        ('require(x > 0, kParamInvalid, self.name, " is a null pointer");', "{name} is a null pointer"),
        ('return failed(kInnerError, function, "it was destroyed before");', "it was destroyed before"),
        ('C10_THROW_ERROR(Error, why(x) + ". See also " + (a ? "one" : "two"));', "{…}. See also {one / two}"),
        ('std::cerr << "out of memory in " << function << std::endl;', "out of memory in {function}{…}"),
        ('case 1:\n  return "a pointer is null";  // "not this one"', "a pointer is null"),
    ],
)
def test_what_cpp_raises_prints_or_returns_is_a_message(source: str, expected: str) -> None:
    assert list(messages_of_cpp(source)) == [expected]


def test_no_sentence_of_the_cpp_sources_is_overlooked() -> None:
    texts = "\n".join(message.text for message in MESSAGES)
    no_messages = {"tests", "error_names.cpp"}
    sources = [
        path
        for path in (ROOT / "csrc").rglob("*.*")
        if path.suffix in (".h", ".cpp") and not no_messages & set(path.parts)
    ]
    literals = [
        literal
        for path in sources
        for line in path.read_text().splitlines()
        if not line.lstrip().startswith("//")
        for literal in re.findall(r'(?<!R)"((?:\\.|[^"\\])*)"', line)
    ]
    sentences = [literal for literal in literals if re.search(r"[A-Za-z]{2,} [A-Za-z]{2,}", literal)]
    assert len(sentences) > 200
    assert [s for s in sentences if s.replace("\\n", "").strip() not in texts and not NO_MESSAGE.search(s)] == []
