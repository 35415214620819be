"""Metal Shading Language -> C++20 for clang: the few things that C++ lacks are rewritten, the rest stays as it is.

    device, thread                                  -> nothing
    constant                                        -> const
    threadgroup float x[8];                         -> a reference into the threadgroup's memory (pointer types stay)
    constant bool c [[function_constant(0)]];       -> mtl::FunctionConstant<bool, 0>
    constant bool d = c && ...;                     -> mtl::DerivedConstant, evaluated where it is used
    kernel void f(...), [[kernel]] void f(...)      -> a function, and behind the last line a wrapper that binds its
    template [[host_name("n")]] [[kernel]] ...         parameters and registers it under its name

Lines keep their numbers, so a sanitizer's report names the line of the .metal file. With check=True the address spaces
stay (as clang's address_space attribute) and the result is only type-checked: see check().
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CXX = os.environ.get("METAL_CXX", "clang++-19")
SHIM = Path(__file__).resolve().parent / "shim"

# The shim replaces Apple's headers; empty ones let the preprocessor pass.
APPLE_HEADERS = (
    "stdlib atomic common compute geometric integer limits logging math matrix numeric pack relational simdgroup "
    "simdgroup_matrix tensor cooperative_tensor type_traits types"
)
PREDEFINED = {
    "__METAL__": "1",
    "__METAL_VERSION__": "400",
    "__METAL_MACOS__": "1",
    "__HAVE_BFLOAT__": "1",
    "METAL_FUNC": "inline __attribute__((__always_inline__))",
    "INFINITY": "__builtin_inff()",
    "NAN": '__builtin_nanf("")',
    "MAXFLOAT": "3.402823466e+38F",
    "FLT_MAX": "3.402823466e+38F",
    "FLT_MIN": "1.175494351e-38F",
    "FLT_EPSILON": "1.192092896e-07F",
    "HALF_MAX": "65504.0h",
    "UINT_MAX": "0xffffffffu",
    "INT_MAX": "0x7fffffff",
}

BUILTIN = re.compile(
    "thread_position_in_grid|threads_per_grid|thread_position_in_threadgroup|threads_per_threadgroup|"
    "dispatch_threads_per_threadgroup|threadgroup_position_in_grid|threadgroups_per_grid|grid_size|grid_origin|"
    "thread_index_in_threadgroup|thread_index_in_simdgroup|simdgroup_index_in_threadgroup|simdgroups_per_threadgroup|"
    "dispatch_simdgroups_per_threadgroup|threads_per_simdgroup|thread_execution_width"
)

TOKEN = re.compile(
    r"""(?P<newline>\n)|(?P<line>^\#[^\n]*)|(?P<space>[ \t\r\f\v]+)|(?P<string>"(?:\\.|[^"\\])*")"""
    r"""|(?P<char>'(?:\\.|[^'\\])*')|(?P<name>[A-Za-z_]\w*)|(?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)"""
    r"""|(?P<op>\[\[|\]\]|::|->|\+\+|--|<<=|>>=|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|<<|.)""",
    re.MULTILINE,
)
BLANK = ("space", "newline", "line")


class MslError(Exception):
    pass


@dataclass
class Token:
    kind: str
    text: str


@dataclass
class Parameter:
    name: str
    attributes: dict[str, str | None]
    declaration: str  # without attributes


@dataclass
class Kernel:
    host_name: str
    expression: str  # the function, with template arguments
    function: str
    max_threads: str


def tokenize(text: str) -> list[Token]:
    return [Token(m.lastgroup, m.group()) for m in TOKEN.finditer(text)]


def text_of(tokens: list[Token]) -> str:
    return "".join(t.text for t in tokens)


def significant(tokens: list[Token]) -> list[Token]:
    return [t for t in tokens if t.kind not in BLANK]


def newlines(tokens: list[Token]) -> str:
    """What must be left of removed tokens: their line ends and line markers."""
    return "".join("\n" if t.kind == "newline" else t.text if t.kind == "line" else "" for t in tokens)


def find(tokens: list[Token], start: int, *texts: str) -> int:
    while tokens[start].text not in texts:
        start += 1
    return start


def after_bracket(tokens: list[Token], start: int, opening: str, closing: str) -> int:
    """Index just past the bracket that closes the one at start."""
    depth = 0
    for i in range(start, len(tokens)):
        depth += (tokens[i].text == opening) - (tokens[i].text == closing)
        if depth == 0:
            return i + 1
    raise MslError(f"no {closing} for the {opening} of token {start}")


def after_template_arguments(tokens: list[Token], start: int) -> int:
    depth = brackets = 0
    for i in range(start, len(tokens)):
        text = tokens[i].text
        if text in ("(", "[", "{", "[["):
            brackets += 1
        elif text in (")", "]", "}", "]]"):
            brackets -= 1
        elif brackets == 0:
            depth += (text == "<") - (text == ">") - 2 * (text == ">>")
            if text in (">", ">>") and depth <= 0:
                return i + 1
    raise MslError("template arguments without an end")


def split_at_commas(tokens: list[Token]) -> list[list[Token]]:
    parts, brackets, angles = [[]], 0, 0
    for t in tokens:
        if t.text in ("(", "[", "{", "[["):
            brackets += 1
        elif t.text in (")", "]", "}", "]]"):
            brackets -= 1
        elif brackets == 0:
            angles += (t.text == "<") - (t.text == ">") - 2 * (t.text == ">>")
        if t.text == "," and brackets == 0 and angles <= 0:
            parts.append([])
        else:
            parts[-1].append(t)
    return [p for p in parts if p]


def take_attributes(tokens: list[Token]) -> tuple[dict[str, str | None], list[Token]]:
    """[[a, b(3)]] -> {"a": None, "b": "3"}, and the tokens without attributes."""
    attributes, rest, i = {}, [], 0
    while i < len(tokens):
        if tokens[i].text == "[[":
            end = find(tokens, i, "]]")
            for attribute in split_at_commas(tokens[i + 1 : end]):
                attributes[attribute[0].text] = text_of(attribute[2:-1]) if len(attribute) > 1 else None
            i = end + 1
        else:
            rest.append(tokens[i])
            i += 1
    return attributes, rest


def preprocess(path: Path, includes: list[Path], defines: list[str], depfile: Path | None = None) -> str:
    with tempfile.TemporaryDirectory() as empty:
        for header in APPLE_HEADERS.split():
            (Path(empty) / f"metal_{header}").touch()
        command = [CXX, "-E", "-x", "c++", "-std=c++20", "-nostdinc", f"-I{empty}"]
        command += [f"-D{name}={value}" for name, value in PREDEFINED.items()]
        command += [f"-I{folder}" for folder in includes] + [f"-D{define}" for define in defines]
        if depfile:
            command += ["-MD", "-MF", str(depfile), "-MT", str(depfile.with_suffix(""))]
        run = subprocess.run([*command, str(path)], capture_output=True, text=True)
    if run.returncode:
        raise MslError(run.stderr)
    if depfile:
        depfile.write_text(depfile.read_text().replace(f"{empty}/", "/dev/null "))
    return run.stdout


def scopes_of(s: list[Token]) -> list[str]:
    """The namespaces that each token lies in, as `outer::inner::`."""
    scopes, opened = [], []
    for i, t in enumerate(s):
        if t.text == "{":
            opened.append(s[i - 1].text + "::" if i > 1 and s[i - 2].text == "namespace" else "")
        elif t.text == "}" and opened:
            opened.pop()
        scopes.append("".join(opened))
    return scopes


class Source:
    """One preprocessed .metal file."""

    def __init__(self, text: str):
        self.tokens = tokenize(text)
        self.parameters: dict[str, list[Parameter]] = {}  # of each kernel function
        self.kernels: list[Kernel] = []
        self.function_constants: set[str] = set()
        self.find_kernels(significant(self.tokens))

    # ---- kernels

    def find_kernels(self, s: list[Token]) -> None:
        i, scopes = 0, scopes_of(s)
        while i < len(s):
            attributes, begin = {}, None
            if s[i].text == "kernel" and s[i - 1].text not in ("[[", ","):
                begin = i + 1
            elif s[i].text == "[[":
                end = find(s, i, "]]")
                attributes = take_attributes(s[i : end + 1])[0]
                if "kernel" in attributes:
                    begin = end + 1
            i = self.read_kernel(s, i, begin, attributes, scopes[i]) if begin else i + 1

    def read_kernel(self, s: list[Token], start: int, begin: int, attributes: dict, scope: str) -> int:
        """A definition `kernel void name(...) {`, or an explicit instantiation that gives it a name for the host.
        Without such a name the host must say its namespaces too (`scope`)."""
        while s[begin].text == "[[":
            end = find(s, begin, "]]")
            attributes |= take_attributes(s[begin : end + 1])[0]
            begin = end + 1
        before, is_template = self.before_kernel(s, start)
        attributes = before | attributes
        host_name = (attributes.get("host_name") or "").strip('"')
        limit = attributes.get("max_total_threads_per_threadgroup") or "1024"
        if s[begin].text == "decltype":
            end = after_bracket(s, begin + 1, "(", ")")
            expression = s[begin + 2 : end - 1]
            self.add_kernel(host_name, expression, expression[0].text, limit)
            return find(s, end, ";")
        if s[begin].text != "void":
            return start + 1
        name, end = s[begin + 1].text, begin + 2
        if s[end].text == "<":
            end = after_template_arguments(s, end)
        expression = s[begin + 1 : end]
        opening, end = end, after_bracket(s, end, "(", ")")
        if s[end].text == "{":
            self.parameters[name] = [self.read_parameter(p) for p in split_at_commas(s[opening + 1 : end - 1])]
            if not is_template:
                self.add_kernel(host_name or scope + name, expression, name, limit, scope)
        elif host_name:
            self.add_kernel(host_name, expression, name, limit)
        return end

    def add_kernel(self, host_name: str, expression: list[Token], function: str, limit: str, scope: str = "") -> None:
        if any(k.host_name == host_name for k in self.kernels):
            raise MslError(f"two kernels are named {host_name!r}")
        self.kernels.append(Kernel(host_name, scope + " ".join(t.text for t in expression), function, limit))

    @staticmethod
    def read_parameter(tokens: list[Token]) -> Parameter:
        attributes, rest = take_attributes(tokens)
        name = next((t.text for t in reversed(rest) if t.kind == "name"), "")
        return Parameter(name, attributes, " ".join(t.text for t in rest))

    @staticmethod
    def before_kernel(s: list[Token], start: int) -> tuple[dict, bool]:
        """Attributes in front of a kernel, and whether it is a template with parameters."""
        attributes, i = {}, start - 1
        while i >= 0 and s[i].text == "]]":
            begin = i
            while s[begin].text != "[[":
                begin -= 1
            attributes |= take_attributes(s[begin : i + 1])[0]
            i = begin - 1
        depth = 0
        if i >= 0 and s[i].text in (">", ">>"):
            while i >= 0:
                depth += (s[i].text == ">") + 2 * (s[i].text == ">>") - (s[i].text == "<")
                if depth == 0:
                    return attributes, s[i - 1].text == "template"
                i -= 1
        return attributes, False

    # ---- rewriting

    def rewrite(self, check: bool = False) -> str:
        out, tokens, i, depth, statement = [], self.tokens, 0, 0, True
        self.threadgroup_variables = 0
        while i < len(tokens):
            t = tokens[i]
            if t.kind in BLANK:
                out.append(t.text)
                i += 1
                continue
            replaced = self.replacement(tokens, i, depth, statement, check)
            if replaced is not None:
                text, i = replaced
                out.append(text)
                statement = tokens[i - 1].text == ";"
                continue
            depth += (t.text == "{") - (t.text == "}")
            statement = t.text in (";", "{", "}", ":")
            out.append(t.text)
            i += 1
        return "".join(out)

    def replacement(self, tokens, i, depth, statement, check) -> tuple[str, int] | None:
        """The text for the tokens from i on, and the index behind them; None keeps the token."""
        text = tokens[i].text
        if text == "[[":  # attributes that C++ does not know
            end = find(tokens, i, "]]")
            return newlines(tokens[i:end]), end + 1
        # An explicit instantiation of a kernel: its wrapper instantiates it. A check sees it as it is.
        if text == "template" and statement and not check:
            following = next(j for j in range(i + 1, len(tokens)) if tokens[j].kind not in BLANK)
            if tokens[following].text == "[[":
                end = find(tokens, i, ";")
                return newlines(tokens[i:end]), end + 1
        if tokens[i].kind != "name":
            return None
        if text == "threadgroup" and statement and depth > 0:
            variable = self.threadgroup_variable(tokens, i, check)
            if variable:
                return variable
        if text == "constant":
            return self.constant(tokens, i, statement, check)
        if check and text in ("device", "threadgroup"):
            return f"__mtl_{text}", i + 1
        if text in ("device", "thread", "threadgroup", "kernel"):
            return "", i + 1
        if check:
            return self.vector_constructor(tokens, i)
        return None

    def threadgroup_variable(self, tokens, i, check) -> tuple[str, int] | None:
        end = find(tokens, i, ";", "{")
        declaration = significant(tokens[i + 1 : end])
        bracket = next((j for j, t in enumerate(declaration) if t.text == "["), len(declaration))
        if tokens[end].text != ";" or any(t.text in ("*", "&") for t in declaration[:bracket]):
            return None
        if check:
            return "static __mtl_threadgroup", i + 1
        if any(t.text == "=" for t in declaration):
            raise MslError(f"threadgroup memory cannot be initialised: {text_of(declaration)}")
        first, *others = split_at_commas(declaration)
        bracket = next((j for j, t in enumerate(first) if t.text == "["), len(first))
        kind = " ".join(t.text for t in first[: bracket - 1])
        result = []
        for variable in (first[bracket - 1 :], *others):
            name, sizes = variable[0].text, text_of(variable[1:])
            self.threadgroup_variables += 1
            n = self.threadgroup_variables
            result.append(
                f"static const char __tg_key{n} = 0; typedef {kind} __tg_type{n}{sizes}; __tg_type{n}& {name} = "
                f"*(__tg_type{n}*)mtl::threadgroup_static(&__tg_key{n}, sizeof(__tg_type{n}), alignof(__tg_type{n}), "
                f'"{name}")'
            )
        return "; ".join(result) + newlines(tokens[i:end]) + ";", end + 1

    def constant(self, tokens, i, statement, check) -> tuple[str, int]:
        if statement:
            end = find(tokens, i, ";", "{")
            attributes, declaration = take_attributes(significant(tokens[i + 1 : end]))
            equals = next((j for j, t in enumerate(declaration) if t.text == "="), len(declaration))
            *kind, name = [t.text for t in declaration[:equals]]
            if "function_constant" in attributes:
                self.function_constants.add(name)
                declared = (
                    f'mtl::FunctionConstant<{" ".join(kind)}, {attributes["function_constant"]}> {name}{{"{name}"}}'
                )
                return f"inline constexpr {declared};{newlines(tokens[i:end])}", end + 1
            used = {t.text for t in declaration[equals:]} & self.function_constants
            if used and "*" not in kind and "&" not in kind:  # known when a kernel runs, not before
                self.function_constants.add(name)
                value = " ".join(t.text for t in declaration[equals + 1 :])
                declared = f"mtl::DerivedConstant<[] {{ return {' '.join(kind)}({value}); }}> {name}{{}}"
                return f"inline constexpr {declared};{newlines(tokens[i:end])}", end + 1
        # A value at program scope needs no address space to be read; a pointer or a reference does.
        end = find(tokens, i + 1, ";", "(", ")", "{", "=", ",", "*", "&", ">")
        return ("const __mtl_constant" if check and tokens[end].text in ("*", "&", ">") else "const"), i + 1

    VECTOR = re.compile(r"(float|half|bfloat|int|uint|short|ushort|char|uchar|long|ulong|bool)[234]")

    def vector_constructor(self, tokens, i) -> tuple[str, int] | None:
        """float4(x) is no C++ for clang's vectors, which the check uses because they live in any address space."""
        if self.VECTOR.fullmatch(tokens[i].text):
            end = i + 1
        elif tokens[i].text == "vec" and tokens[i + 1].text == "<":
            end = after_template_arguments(tokens, i + 1)
        else:
            return None
        opening = next((j for j in range(end, len(tokens)) if tokens[j].kind not in BLANK), None)
        if opening is None or tokens[opening].text != "(":
            return None
        return f"mtl_make<{text_of(tokens[i:end])}>", end

    # ---- wrappers

    def wrappers(self) -> str:
        lines = ["", '# 1 "wrappers"', "namespace mtl_wrappers {"]
        for n, kernel in enumerate(self.kernels):
            if kernel.function not in self.parameters:
                raise MslError(f"kernel {kernel.host_name!r}: no function {kernel.function}")
            parameters = self.parameters[kernel.function]
            taken = {int(p.attributes["buffer"]) for p in parameters if (p.attributes.get("buffer") or "").isdigit()}
            arguments, described = [], []
            for i, p in enumerate(parameters):
                kind = f"P{n}::at<{i}>"
                if not p.attributes and ("*" in p.declaration or "&" in p.declaration):  # Metal numbers these itself
                    p.attributes["buffer"] = str(next(b for b in range(31) if b not in taken))
                    taken.add(int(p.attributes["buffer"]))
                if "buffer" in p.attributes:
                    arguments.append(f"mtl::Argument<{kind}>::buffer({p.attributes['buffer']})")
                    condition = p.attributes.get("function_constant")
                    bound = f"[] {{ return bool({condition}); }}" if condition else "nullptr"
                    described.append(
                        f'{{{p.attributes["buffer"]}, "{p.name}", mtl::Argument<{kind}>::writable, '
                        f"mtl::Argument<{kind}>::fixed_size, mtl::Argument<{kind}>::alignment, {bound}}}"
                    )
                elif "threadgroup" in p.attributes:
                    arguments.append(f"mtl::Argument<{kind}>::threadgroup({p.attributes['threadgroup']})")
                else:
                    builtin = next((a for a in p.attributes if BUILTIN.fullmatch(a)), None)
                    if builtin is None:
                        raise MslError(f"kernel {kernel.function}: parameter {p.name!r} has no known attribute")
                    arguments.append(f"mtl::Argument<{kind}>::id(mtl::ids().{builtin})")
            lines.append(f"using P{n} = mtl::Parameters<std::remove_pointer_t<decltype(&{kernel.expression})>>;")
            lines.append(f"static_assert(P{n}::count == {len(parameters)});")
            lines.append(f"static void run{n}() {{ {kernel.expression}({', '.join(arguments)}); }}")
            lines.append(f"static const mtl::Buffer buffers{n}[] = {{{', '.join([*described, '{}'])}}};")
            lines.append(
                f'static mtl::Kernel kernel{n}{{"{kernel.host_name}", run{n}, buffers{n}, {len(described)}, '
                f"{kernel.max_threads}, nullptr}};"
            )
            lines.append(f"static const bool registered{n} = mtl::register_kernel(&kernel{n});")
        lines += ["}", ""]
        return "\n".join(lines)


def translate(path: Path, includes: list[Path] = (), defines: list[str] = (), depfile: Path | None = None) -> str:
    source = Source(preprocess(path, list(includes), list(defines), depfile))
    if not source.kernels:
        raise MslError(f"{path}: no kernels")
    return '#include "metal.h"\n' + source.rewrite() + source.wrappers()


# ---- check: what Apple's compiler would reject and the shim does not

CHECK_FLAGS = (
    "-std=c++20 -fsyntax-only -Wall -Wextra -Wno-unused -Wno-reserved-user-defined-literal -Wno-undefined-inline "
    "-Wno-undefined-internal -Wno-unknown-pragmas -Wno-sign-compare"
)
NOT_IN_MSL = re.compile("double|goto|dynamic_cast|throw|try|catch|new|delete|typeid|thread_local|virtual|asm")
TYPE = re.compile("float|half|bfloat|u?int|u?short|u?char|u?long|bool")
SCALAR = re.compile(TYPE.pattern + "|T|U|void|size_t|u?int(8|16|32|64)_t")


def lint(source: Source, path: Path) -> list[str]:
    """Keywords that MSL lacks, types as names, and pointers and references without an address space."""
    complaints, placed, file, line = [], [], str(path), 1
    for t in source.tokens:
        marker = re.match(r'#\s+(\d+)\s+"([^"]*)"', t.text) if t.kind == "line" else None
        if marker:
            file, line = marker[2], int(marker[1]) - 1
        if t.kind not in BLANK:
            placed.append((t, f"{file}:{line}"))
        line += t.text.count("\n")
    for i, (t, place) in enumerate(placed):
        if t.kind == "name" and NOT_IN_MSL.fullmatch(t.text):
            complaints.append(f"{place}: '{t.text}' does not exist in MSL")
        if i > 0 and TYPE.fullmatch(placed[i - 1][0].text) and TYPE.fullmatch(t.text):
            complaints.append(f"{place}: '{t.text}' is a type in MSL")
        declares = t.text in ("*", "&") and 1 < i < len(placed) - 1 and placed[i - 1][0].kind == "name"
        if declares and (placed[i + 1][0].kind == "name" or placed[i + 1][0].text in ("*", "__restrict__")):
            begin = i - 1
            while begin >= 0 and placed[begin][0].text not in (*";{}(),=<:", "]]", "return"):
                begin -= 1
            words = [p[0].text for p in placed[begin + 1 : i]]
            types = set(words) - {"const", "volatile"}
            if placed[begin][0].text in (*";{}(,", "]]") and len(types) == 1 and SCALAR.fullmatch(*types):
                name = placed[i + 1][0].text
                complaints.append(f"{place}: {' '.join(words)}{t.text} {name} has no address space")
    return complaints


def check(path: Path, includes: list[Path] = (), defines: list[str] = ()) -> list[str]:
    """Complaints about a .metal file, with real address spaces and clang's own vectors."""
    source = Source(preprocess(path, list(includes), list(defines)))
    complaints = lint(source, path)
    uses = [f"[[maybe_unused]] static auto* volatile k{n} = &{k.expression};" for n, k in enumerate(source.kernels)]
    text = '#include "check.h"\n' + source.rewrite(check=True) + "\nnamespace mtl_check { " + " ".join(uses) + " }\n"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{Path(path).stem}.cpp"
        file.write_text(text)
        run = subprocess.run([CXX, *CHECK_FLAGS.split(), f"-I{SHIM}", str(file)], capture_output=True, text=True)
    return complaints + [line for line in run.stderr.splitlines() if " error: " in line or " warning: " in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="the C++ file")
    parser.add_argument("-I", dest="includes", type=Path, action="append", default=[])
    parser.add_argument("-D", dest="defines", action="append", default=[])
    parser.add_argument("--depfile", type=Path, help="for ninja")
    parser.add_argument("--check", action="store_true", help="type check with address spaces; prints complaints")
    args = parser.parse_args()
    try:
        if args.check:
            complaints = check(args.source, args.includes, args.defines)
            sys.exit("\n".join(complaints) if complaints else 0)
        args.output.write_text(translate(args.source, args.includes, args.defines, args.depfile))
    except MslError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
