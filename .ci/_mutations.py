"""Small changes of sources: Python's are made by cosmic-ray's operators, those of C++ by a table of patterns."""

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names


@dataclass(frozen=True)
class Mutant:
    """A changed source, and the line that changed before and after."""

    path: Path
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}\n    {self.after}"


class _RemoveStatement(Operator):  # type: ignore[misc]
    """Removes a call, and an assignment to an attribute or an item, which cosmic-ray has no operator for."""

    def mutation_positions(self, node: parso.tree.NodeOrLeaf) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        changes = node.children[0] if node.type == "expr_stmt" else node
        if changes.type == "atom_expr" and node.parent.type == "simple_stmt":
            yield node.start_pos, node.end_pos

    def mutate(self, node: parso.tree.NodeOrLeaf, index: int) -> parso.tree.NodeOrLeaf:
        return parso.python.tree.Name("None", node.start_pos, node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


# An operator of Python is only replaced by one of the same kind: a TypeError would be no test of the tests.
_KINDS = ("Add Sub Mul Div FloorDiv Mod Pow", "BitOr BitAnd BitXor LShift RShift", "Eq NotEq Lt LtE Gt GtE", "Is IsNot")


def _is_plausible(name: str) -> bool:
    kind, _, operators = name.removeprefix("core/").partition("_")
    old, _, new = operators.partition("_")
    if kind == "ReplaceUnaryOperator":
        return old == "Delete"
    return kind != "NoOp" and (not old or any({old, new} <= set(each.split()) for each in _KINDS))


def _operators() -> dict[str, Operator]:
    classes = {name: get_operator(name) for name in operator_names() if _is_plausible(name)}
    made = {name: each() for name, each in classes.items() if not each.arguments()}
    return {**made, "RemoveStatement": _RemoveStatement()}


def _is_code(node: parso.tree.NodeOrLeaf) -> bool:
    """Tell a calculation from an annotation, and from the star and the slash of a function's parameters."""
    if node.parent is not None and node.parent.type in ("parameters", "param", "lambdef"):
        return False
    while node.parent is not None:
        index = node.parent.children.index(node)
        sign = getattr(node.parent.children[index - 1], "value", None) if index else None
        if sign == "->" or sign == ":" and node.parent.type in ("tfpdef", "annassign"):
            return False
        node = node.parent
    return True


def _places_in_python(code: str) -> dict[tuple[tuple[int, int], tuple[int, int]], list[tuple[str, int]]]:
    """Return where the source can change, and for each place the operators with the number of their occurrence."""
    places: dict[tuple[tuple[int, int], tuple[int, int]], list[tuple[str, int]]] = {}
    nodes = list(ast_nodes(get_ast(code)))
    for name, operator in _OPERATORS.items():
        found = [(node, position) for node in nodes for position in operator.mutation_positions(node)]
        for occurrence, (node, position) in enumerate(found):
            if _is_code(node):
                places.setdefault(position, []).append((name, occurrence))
    return places


_OPERATORS = _operators()

# Patterns of C++ with what replaces them. clang-format puts spaces around operators, and none around a template's list.
_RULES = [
    *((f" {old} ", f" {new} ") for old, new in [("==", "!="), ("!=", "=="), ("<", "<="), ("<=", "<"), (">", ">=")]),
    *((f" {old} ", f" {new} ") for old, new in [(">=", ">"), ("<", ">"), (">", "<"), ("&&", "||"), (r"\|\|", "&&")]),
    *((f" {old} ", f" {new} ") for old, new in [(r"\+", "-"), ("-", "+"), (r"\*", "+"), ("/", "*"), ("%", "+")]),
    *((f" {old} ", f" {new} ") for old, new in [(r"\+=", "-="), ("-=", "+=")]),
    *((rf"\b{old}\b", new) for old, new in [("true", "false"), ("false", "true")]),
    (r"(?<![\w.])\d+(?![\w.])", lambda found: str(int(found[0]) + 1)),
    (r"\bif \((?!.*\bconstexpr\b)(.*)\) ", r"if (!(\1)) "),
    (r"(?<=[ (])!(?=\w)", ""),
    # A statement that fits a line: a call, or an assignment to what there is already.
    (r"^(\s+)(?!return|throw|using|delete|break|continue|goto|case)[\w.:>\[\]-]+(\(.*\)| [-+*/]?= .*);$", r"\1;"),
]
_LITERAL_OR_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|//.*|\'(?:[^\'\\]|\\.)\'')
_NO_CODE = re.compile(r"\s*(#|//|/\*|\*|using |template|namespace |static_assert|extern |inline constexpr char)")


def _cpp_mutants(path: Path, code: str) -> Iterator[list[Mutant]]:
    lines = code.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if _NO_CODE.match(line):
            continue
        masked = _LITERAL_OR_COMMENT.sub(lambda found: "\0" * len(found[0]), line)
        places: dict[int, list[Mutant]] = {}
        for pattern, replacement in _RULES:
            for found in re.finditer(pattern, masked, re.MULTILINE):
                text = found.expand(replacement) if isinstance(replacement, str) else replacement(found)
                changed = line[: found.start()] + _unmasked(text, line, masked) + line[found.end() :]
                if text.strip() == ";" and line.count("(") != line.count(")"):
                    continue
                source = "".join([*lines[:number], changed, *lines[number + 1 :]])
                mutant = Mutant(path, number + 1, line.strip(), changed.strip(), source)
                places.setdefault(found.start(), []).append(mutant)
        yield from places.values()


def _unmasked(text: str, line: str, masked: str) -> str:
    literals = iter(line[found.start() : found.end()] for found in re.finditer("\0+", masked))
    return re.sub("\0+", lambda _: next(literals), text) if "\0" in text else text


def _python_mutant(path: Path, code: str, line: int, operator: str, occurrence: int) -> Mutant | None:
    source = mutate_code(code, _OPERATORS[operator], occurrence)
    try:
        if ast.dump(ast.parse(source)) == ast.dump(ast.parse(code)):
            return None
    except SyntaxError:
        return None
    before, after = (text.splitlines()[line - 1].strip() for text in (code, source))
    return Mutant(path, line, before, after, source)


def _rank(seed: int, *what: object) -> bytes:
    return hashlib.sha256(repr((seed, *what)).encode()).digest()


def python(root: Path, paths: Iterable[Path], seed: int) -> Iterator[Mutant]:
    """Yield one mutant for each place of sources in Python, in the seed's order.

    The order depends on the text of a line and not on its number: after a change most of them are chosen again.
    """
    places = []
    for path in paths:
        code = (root / path).read_text()
        lines = code.splitlines()
        for (start, end), operators in _places_in_python(code).items():
            line = lines[start[0] - 1]
            places.append((_rank(seed, str(path), line, start[1], end[1]), path, code, start[0], operators))
    for rank, path, code, line, operators in sorted(places, key=lambda place: place[0]):
        for operator, occurrence in sorted(operators, key=lambda each: _rank(seed, rank, each[0])):
            if (mutant := _python_mutant(path, code, line, operator, occurrence)) is not None:
                yield mutant
                break


def cpp(root: Path, paths: Iterable[Path], seed: int) -> Iterator[Mutant]:
    """Yield one mutant for each place of sources in C++, in the seed's order; not all of them can be compiled."""
    places = [mutants for path in paths for mutants in _cpp_mutants(path, (root / path).read_text())]
    chosen = [min(each, key=lambda one: _rank(seed, one.before, one.after)) for each in places]
    yield from sorted(chosen, key=lambda one: _rank(seed, str(one.path), one.before, one.after))
