"""Write docs/what_can_go_wrong.md: the messages of the sources, and their causes and cures from tests/_causes.py.

``python -m tests.what_can_go_wrong`` writes the page, or says which message has no cause and which cause no message.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tests._causes import SECTIONS, Cause
from tests._messages import ROOT, Message, collect
from tests._pages import anchor

PAGE = ROOT / "docs/what_can_go_wrong.md"
_INTRODUCTION = """\
# What can go wrong

Every message of the package, its cause and its cure. Search this page for some words of the message that you saw, but
not for names, numbers and shapes: these are in braces here, `{name}` for one thing, `{a / b}` for one of two, `{…}` for
anything. Some messages end in a reason, which has a place of its own.

Written by `python -m tests.what_can_go_wrong` from the sources and from `tests/_causes.py`, not by hand.

`python -m torch_aclnn_ops.doctor` says what is installed and what is missing, `torch_aclnn_ops.explain` which way a
call takes.
"""

Sections = Mapping[str, Sequence[Cause]]


def assign(messages: Iterable[Message], sections: Sections) -> tuple[dict[Cause, list[str]], list[str]]:
    """Return the messages of each cause, and what is wrong: each message has one cause, and each cause a message."""
    causes = [cause for listed in sections.values() for cause in listed]
    found: dict[Cause, dict[str, None]] = {cause: {} for cause in causes}
    used: set[tuple[Cause, str]] = set()
    wrong = []
    for message in messages:
        fitting = sorted(
            ((len(words), cause, words) for cause in causes for words in cause.fitting(message)),
            key=lambda fit: -fit[0],
        )
        if not fitting:
            wrong.append(f"no cause in tests/_causes.py has words of {message.path}: {message.text}")
            continue
        longest, cause, words = fitting[0]
        if any(length == longest and other is not cause for length, other, _ in fitting):
            wrong.append(f"two causes have words of {message.path}: {message.text}")
        found[cause][message.text] = None
        used.add((cause, words))
    for cause in causes:
        wrong += [f"no message needs the words {words!r}" for words in cause.words if (cause, words) not in used]
    return {cause: list(texts) for cause, texts in found.items()}, wrong


def page(messages_of: Mapping[Cause, Sequence[str]], sections: Sections) -> str:
    """Return the page."""
    return "\n".join([_INTRODUCTION, *_lines(messages_of, sections)])


def _lines(messages_of: Mapping[Cause, Sequence[str]], sections: Sections) -> Iterator[str]:
    for title in sections:
        yield f"- [{title}](#{anchor(title)})"
    for title, causes in sections.items():
        yield f"\n## {title}"
        for cause in causes:
            yield ""
            yield from (f"- `{text}`" for text in messages_of[cause])
            yield f"\n**Cause:** {cause.cause}<br>\n**Cure:** {cause.cure}"
    yield ""


def main() -> None:
    """Write the page."""
    messages_of, wrong = assign(collect(), SECTIONS)
    if wrong:
        sys.exit("\n".join(wrong))
    PAGE.write_text(page(messages_of, SECTIONS))


if __name__ == "__main__":
    main()
