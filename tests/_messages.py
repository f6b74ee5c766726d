"""Every sentence of the sources that a user may meet: exceptions, warnings, notes, and the reasons that they pass on.

What a sentence has only when it is raised stands in braces: ``{dtype}`` for ``{tensor.dtype}`` or ``tensor.dtype()``,
``{host / device}`` for one of two.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ANYTHING = "{…}"
_PYTHON = ("setup.py", "csrc/host_npu/build.py", "torch_aclnn_ops/**/*.py")
_CPP = ("csrc/npu/*.*", "csrc/autograd/*.*", "csrc/cpu/*.*", "csrc/host_npu/*/*.cpp", "csrc/host_npu/*/*.h")
_TESTS = ROOT / "csrc/host_npu/tests"


class Message(NamedTuple):
    """A sentence, and the file that has it."""

    text: str
    path: str


def collect() -> list[Message]:
    """Return the messages of all sources, each once per file, in the order of the files."""
    found: dict[Message, None] = {}
    for patterns, read in ((_PYTHON, messages_of_python), (_CPP, messages_of_cpp)):
        for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern) if path.parent != _TESTS}):
            texts = (re.sub(r"\s+", " ", text).strip() for text in read(path.read_text()))
            name = path.relative_to(ROOT).as_posix()
            found.update((Message(text, name), None) for text in texts if _has_words(text))
    return list(found)


def _has_words(text: str) -> bool:
    """Return whether the sentence is more than what another has made, as in ``raise OSError(reason)``."""
    return re.search(r"[^\s\W]", re.sub(r"{[^}]*}", "", text)) is not None or text.count("{") > 1


def messages_of_python(source: str) -> Iterator[str]:
    """Yield what a module raises or warns of, and the strings that it returns or keeps as a reason."""
    tree = ast.parse(source)
    constants = {
        target.id: str(node.value.value)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.Module | ast.ClassDef)
        for node in scope.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and type(node.value.value) in (str, int)
    }
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        for value in _sentences(node, functions):
            if text := _text(value, constants):
                yield text


# Functions whose argument of this number is a sentence.
_TELLS = {"warn": 0, "warning": 0, "error": 0, "exit": -1, "add_note": -1}


def _sentences(node: ast.AST, functions: dict[str, ast.FunctionDef]) -> Iterator[ast.expr]:
    match node:
        case ast.Raise(exc=ast.Call() as call) if _name(call.func) not in functions:
            yield from call.args[:1]
        case ast.Call(func=function, args=[_, *_] as args) if _name(function) in _TELLS:
            yield from _made_by(args[_TELLS[_name(function)]], functions)
        case ast.Return(value=ast.Call(func=function, args=[first, *_])) if _name(function).endswith("Error"):
            yield first
        # The package's functions that say why return None where there is nothing to say.
        case ast.FunctionDef(returns=ast.BinOp(left=ast.Name("str"), right=ast.Constant(None))):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield from _alternatives(inner.value)
        case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
            if _name(target).strip("_") == "reason":
                yield from _alternatives(value)


def _made_by(value: ast.expr, functions: dict[str, ast.FunctionDef]) -> Iterator[ast.expr]:
    """Yield what a function of the same module returns, where the sentence is its result."""
    if isinstance(value, ast.Call) and _name(value.func) in functions:
        returns = [node for node in ast.walk(functions[_name(value.func)]) if isinstance(node, ast.Return)]
        yield from (node.value for node in returns if node.value is not None)
    else:
        yield value


def _alternatives(value: ast.expr) -> Iterator[ast.expr]:
    match value:
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*_alternatives(body), *_alternatives(orelse))
        case ast.BoolOp(values=values):
            yield from (inner for each in values for inner in _alternatives(each))
        case _:
            yield value


def _text(value: ast.expr, constants: dict[str, str]) -> str:
    match value:
        case ast.Constant(str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(part, constants) for part in values)
        case ast.FormattedValue(value=inner):
            is_choice = isinstance(inner, ast.IfExp)
            return constants.get(_name(inner)) or (_text(inner, constants) if is_choice else _placeholder(inner))
        case ast.IfExp():
            return _either(constants.get(_name(part)) or _text(part, constants) for part in _alternatives(value))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, constants) + _text(right, constants)
    return _placeholder(value)


def _placeholder(value: ast.expr) -> str:
    match value:
        case ast.Call(func=ast.Name("list" | "int" | "str" | "sorted" | "tuple" | "len"), args=[inner]):
            return _placeholder(inner)
        case ast.Name() | ast.Attribute() if "__" not in _name(value):
            return f"{{{_name(value).strip('_')}}}"
    return ANYTHING


def _either(alternatives: Iterable[str]) -> str:
    return "{" + " / ".join(re.sub(r"[{}]", "", text) for text in alternatives) + "}"


def _name(value: ast.expr) -> str:
    return getattr(value, "id", None) or getattr(value, "attr", "")


# A call of C++ that takes a sentence, and how many of its arguments stand before it.
_CALLS = {
    r"TORCH_CHECK\w*": 1,
    "TORCH_INTERNAL_ASSERT": 1,
    r"TORCH_WARN\w*": 0,
    "C10_THROW_ERROR": 1,
    "require": 1,
    "failed": 0,
    "fail": 0,
    "record_failure": 0,
    "report_missing": 2,
    "failure": 0,
    "refuse": 0,
    "unsupported": 0,
    "report_error": 0,
    "Refusal": 0,
    "say": 0,
    r"fault_\.emplace": 0,
    r"throw [\w:]+": 0,
}
_CALL = re.compile(
    "|".join(rf"(?P<_{i}>\b{name})(?=\s*[({{])" for i, name in enumerate(_CALLS)) + r"|\breturn\b|std::cerr <<"
)
_TOKEN = re.compile(
    r'R"\(.*?\)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*.*?\*/|\w+|::|->|<<|.', re.DOTALL
)
# What stands before a sentence and is not part of it: a status, or the function of CANN, which is named before it.
_NO_SENTENCE = re.compile(r"k[A-Z]\w*|ACL_\w+|HCCL_\w+|status|function|(\w+(\.|->))?(first|api|phase_\w+)|__func__")
# What may stand behind one.
_STATUS = re.compile(r"(ACL|HCCL)_[A-Z_]+")
_WRAPPERS = re.compile(
    r"(?:std::to_string|std::string|to_string|dtype_name|describe|c10::toString|static_cast<\w+>)\((.*)\)"
)


def messages_of_cpp(source: str) -> Iterator[str]:
    """Yield what a file of C++ raises, prints or returns as a sentence of its own."""
    tokens = [token for token in _TOKEN.findall(source) if not token.startswith(("//", "/*"))]
    starts: list[int] = []
    length = 0
    for token in tokens:
        starts.append(length)
        length += len(token)
    at = {start: index for index, start in enumerate(starts)}
    # Strings are blanked, so that no call is looked for inside.
    code = "".join('"' + "_" * (len(token) - 2) + '"' if token[0] == '"' else token for token in tokens)
    for match in _CALL.finditer(code):
        is_call = match.lastgroup is not None
        before = list(_CALLS.values())[int(match.lastgroup[1:])] if match.lastgroup else 0
        arguments = _arguments(tokens[at[match.end()] :], is_call)[before:]
        while len(arguments) > 1 and _NO_SENTENCE.fullmatch("".join(arguments[0])):
            del arguments[0]
        while len(arguments) > 1 and _STATUS.fullmatch("".join(arguments[-1])):
            del arguments[-1]
        text = "".join(map(_sum, arguments))
        # A word alone is the name of an argument, which `require` puts in the sentence "{argument} is null".
        if re.search(r"(?:[A-Za-z]{2,}|}) [A-Za-z]{2,}", text):
            yield text


def _arguments(tokens: list[str], is_call: bool) -> list[list[str]]:
    """Return the arguments of the call that begins here, or what follows up to the semicolon."""
    depth = 0
    body: list[str] = []
    for token in tokens:
        depth += (token in "([{") - (token in ")]}")
        if not is_call and token == ";" or is_call and token in ")}" and depth == 0:
            break
        if not token.isspace():
            body.append(token)
    return _split(body[1:] if is_call else body, ",")


def _split(tokens: list[str], *separators: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in "([{") - (token in ")]}")
        if depth == 0 and token in separators:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _sum(tokens: list[str]) -> str:
    return "".join(_part(part) for part in _split(tokens, "+", "<<"))


def _part(tokens: list[str]) -> str:
    """Return the text of a literal, or a placeholder."""
    if not tokens:
        return ""
    if all(token[0] == '"' for token in tokens):
        return "".join(ast.literal_eval(token) for token in tokens)
    if tokens[0] == "(" and len(choice := _split(tokens[1:-1], "?", ":")) == 3:
        return _either(map(_sum, choice[1:]))
    text = "".join(tokens)
    while match := _WRAPPERS.fullmatch(text):
        text = match[1]
    if re.fullmatch(r'"[^"]*"', text):
        return text[1:-1]
    name = re.fullmatch(r"(?:[\w:]+(?:\.|->))*(\w+?)_?(?:\(\))?", text)
    return f"{{{name[1]}}}" if name else ANYTHING
