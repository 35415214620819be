"""Every error message of the sources, as a template: its own words, and <> for what a call puts in.

Python is read as a syntax tree. C++ is read word by word: messages are made by `fail`, `throw std::runtime_error` and
the other helpers of HELPERS, from texts, texts given a name before, and choices between two texts.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOLE = "<>"

PYTHON_FOLDERS = ("torch-ext/paged_attn", "engines")
CXX_FOLDERS = ("torch-ext", "paged_decode_cpu", "paged_decode_cuda", "paged_decode_metal")
CXX_SUFFIXES = (".h", ".cpp", ".cu", ".cuh", ".mm")

# Python functions that give an error with the words of another one.
PASSED_ON = ("reworded",)

# What a helper of C++ makes of its arguments, by its name and their number. `check` compares a tensor with what is
# expected of it (checks.h).
HELPERS = {
    ("fail", 1): "{0}",
    ("fail", 2): "metal: {0}: <>",
    ("std::runtime_error", 1): "{0}",
    ("bad_value", 4): "{0}[<>]: expected {3}, got <>",
    ("check", 5): "{1}: expected <> [<>], got <> [<>]",
    ("check_rows", 8): "{1}: expected <> [<>], got <> [<>]",
    ("check_cuda", 2): "{1}: <>",
    ("__assertfail", 5): "{0}",
}
HELPER_NAMES = {name for name, _ in HELPERS}
# The words of `check` itself. Its calls say them with a name.
OF_CHECK = "<>: expected <>], got <>"
# And those of `got`, which makes reasons of the Metal routes.
OF_GOT = "expected <>, got <>"

COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.S)
WORD = re.compile(r'"(?:\\.|[^"\\])*"|[A-Za-z_]\w*(?:::\w+)*|\S')
FUNCTION = re.compile(r"^(?!namespace|static_assert|using|constexpr|#)[^\s}].*?\b(\w+)\(", re.M)


def messages() -> dict[str, str]:
    """Templates, and the file that each comes from."""
    found = {}
    for path in _files(PYTHON_FOLDERS, (".py",)):
        found |= dict.fromkeys(_python_messages(path.read_text()), str(path.relative_to(ROOT)))
    for path in _files(CXX_FOLDERS, CXX_SUFFIXES):
        found |= dict.fromkeys(_cxx_messages(path.read_text()), str(path.relative_to(ROOT)))
    del found[OF_CHECK]
    return {text: path for text, path in found.items() if re.search(r"\w", text.replace(HOLE, ""))}


def reasons() -> dict[str, str]:
    """What `why_not` of an explanation can say, and the file that says it."""
    found = {}
    for path in _files(CXX_FOLDERS, CXX_SUFFIXES):
        found |= dict.fromkeys(_cxx_reasons(path.read_text()), str(path.relative_to(ROOT)))
    del found[OF_GOT]
    return {text: path for text, path in found.items() if re.search(r"\w", text.replace(HOLE, ""))}


def _files(folders, suffixes) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)


# ---- Python


def _python_messages(source: str) -> Iterator[str]:
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = list(ast.walk(function))
        named = {
            node.targets[0].id: node.value
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in nodes:
            error = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(error, ast.Call) and error.args and getattr(error.func, "id", None) not in PASSED_ON:
                yield _python_text(error.args[0], named)


def _python_text(node: ast.expr, named: dict[str, ast.expr]) -> str:
    """The text of an expression; a name stands for the text that was assigned to it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_python_text(part, named) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _python_text(node.value, named)
    if isinstance(node, ast.Name) and isinstance(named.get(node.id), ast.JoinedStr):
        return _python_text(named[node.id], named)
    return HOLE


# ---- C++


def _functions(source: str) -> Iterator[tuple[str, list[str]]]:
    """Name and words of each function, with what stands before the next one."""
    source = COMMENT.sub(lambda match: match[1] or "", source)
    functions = [(0, ""), *((match.start(), match[1]) for match in FUNCTION.finditer(source)), (len(source), "")]
    for (start, name), (end, _) in itertools.pairwise(functions):
        yield name, WORD.findall(source[start:end])


def _returned(words: list[str]) -> Iterator[str]:
    for i in (i for i, word in enumerate(words) if word == "return"):
        yield from _texts(words[i + 1 : words.index(";", i)], words)


def _cxx_reasons(source: str) -> Iterator[str]:
    for name, words in _functions(source):
        if "why_not" in name:
            yield from _returned(words)
        for i in (i for i, word in enumerate(words[:-1]) if words[i + 1] == "("):
            arguments = _split(_inside(words, i + 1), ",")
            if words[i] == "emplace_back" and len(arguments) == 2:
                yield from _texts(arguments[1], words)
            if words[i] == "got" and len(arguments) == 2:
                yield from (f"expected {text}, got {HOLE}" for text in _texts(arguments[0], words))


def _cxx_messages(source: str) -> Iterator[str]:
    for name, words in _functions(source):
        if name == "unsupported_reason":
            yield from _returned(words)
        for i, word in enumerate(words[:-1]):
            if word not in HELPER_NAMES or words[i + 1] != "(":
                continue
            arguments = _split(_inside(words, i + 1), ",")
            template = HELPERS.get((word, len(arguments)))
            is_definition = any(argument[:1] == ["const"] for argument in arguments)
            in_helper = name in HELPER_NAMES - {"check"}
            if template and not is_definition and not in_helper:
                for chosen in itertools.product(*(_texts(argument, words) for argument in arguments)):
                    yield template.format(*chosen)


def _inside(words: list[str], opening: int) -> list[str]:
    """The words between the bracket at `opening` and its partner."""
    depth = 0
    for i in range(opening, len(words)):
        depth += (words[i] in "([{") - (words[i] in ")]}")
        if depth == 0:
            return words[opening + 1 : i]
    raise ValueError(f"no partner for the bracket in {' '.join(words[opening : opening + 20])}")


def _split(words: list[str], separator: str) -> list[list[str]]:
    """The parts between separators that stand in no bracket."""
    parts, depth = [[]], 0
    for word in words:
        depth += (word in "([{") - (word in ")]}")
        if depth == 0 and word == separator:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _texts(words: list[str], function: list[str]) -> list[str]:
    """All texts that an expression can give."""
    choice = _split(words, "?")
    if len(choice) == 2:
        return [text for branch in _split(choice[1], ":") for text in _texts(branch, function)]
    terms = [_texts_of_term(term, function) for term in _split(words, "+")]
    return ["".join(chosen) for chosen in itertools.product(*terms)]


def _texts_of_term(words: list[str], function: list[str]) -> list[str]:
    if words and all(word[0] == '"' for word in words):
        return ["".join(ast.literal_eval(word) for word in words)]
    opening = 1 if words[:1] == ["std::string"] else 0
    if words[opening : opening + 1] == ["("] and len(_inside(words, opening)) + 2 + opening == len(words):
        return _texts(_inside(words, opening), function)
    if len(words) == 1:
        return _texts_of_name(words[0], function)
    return [HOLE]


def _texts_of_name(name: str, function: list[str]) -> list[str]:
    """Of a std::string: what it is made from, with and without what is added to it later."""
    texts = [HOLE]
    for i in range(len(function) - 2):
        if function[i : i + 3] == ["std::string", name, "="]:
            texts = _texts(function[i + 3 : function.index(";", i)], function)
        if function[i : i + 3] == [name, "+", "="]:
            added = _texts(function[i + 3 : function.index(";", i)], function)
            if texts != [HOLE]:
                texts += [text + more for text in texts for more in added]
    return texts


if __name__ == "__main__":
    for text, path in sorted(messages().items()):
        print(f"{text}    ({path})")
