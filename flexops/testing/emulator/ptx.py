"""Translates PTX, as NVRTC makes it, to C++ and compiles that: ``python ptx.py FOLDER KERNEL.ptx``
prints the path of the library, which is kept in FOLDER. Standard library only: it runs as a script,
too.

Each instruction becomes one statement, each register a local variable, a label a label; device.h is
what the statements call. An instruction that is not known here is an error which names it.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

SIZES = {"pred": 1, "8": 1, "16": 2, "32": 4, "64": 8, "16x2": 4, "x2": 2}
NAMES = {
    "pred": "bool",
    **{
        f"{kind}{size}": f"{sign}{size}"
        for size in (8, 16, 32, 64)
        for kind, sign in (("b", "u"), ("u", "u"), ("s", "s"))
    },
}
NAMES |= {
    name: name for name in ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64", "e4m3x2", "e5m2x2")
}
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
FLAGS = {
    "rn": "RN",
    "rz": "RZ",
    "rm": "RM",
    "rp": "RP",
    "rni": "INT",
    "rzi": "INT|RZ",
    "rmi": "INT|RM",
    "rpi": "INT|RP",
    "ftz": "FTZ",
    "sat": "SAT",
    "NaN": "NAN_WINS",
    "wrap": "WRAP",
    "clamp": "0",
    "satfinite": "FINITE",
    "relu": "RELU",
    "approx": "0",
    "full": "0",
    "lo": "0",
}
FLOAT = "rn rz rm rp ftz sat"
# Of result and operands: T is the type, W the one of twice its size. What else may stand in the
# name.
ARITHMETIC = {
    **dict.fromkeys(("add", "sub"), ("TTT", FLOAT)),
    "mul": ("TTT", FLOAT + " lo"),
    "mul.hi": ("TTT", ""),
    "mul.wide": ("WTT", ""),
    "div": ("TTT", FLOAT + " approx full"),
    "rem": ("TTT", ""),
    "fma": ("TTTT", FLOAT),
    "mad": ("TTTT", FLOAT + " lo"),
    "mad.hi": ("TTTT", ""),
    "mad.wide": ("WTTW", ""),
    **dict.fromkeys(("min", "max"), ("TTT", "ftz NaN")),
    **dict.fromkeys(("and", "or", "xor"), ("TTT", "")),
    "copysign": ("TTT", ""),
    "not": ("TT", ""),
    **dict.fromkeys(("neg", "abs"), ("TT", "ftz")),
    **dict.fromkeys(("sqrt", "rcp"), ("TT", "rn rz rm rp ftz approx")),
    **dict.fromkeys(("rsqrt", "ex2", "lg2", "sin", "cos", "tanh"), ("TT", "approx ftz")),
    **dict.fromkeys(("shl", "shr"), ("TTu", "")),
    "shf.l": ("TTTu", "wrap clamp"),
    "shf.r": ("TTTu", "wrap clamp"),
    **dict.fromkeys(("popc", "clz"), ("uT", "")),
    "brev": ("TT", ""),
    **dict.fromkeys(("bfind", "bfind.shiftamt"), ("uT", "")),
    "bfe": ("TTuu", ""),
    "bfi": ("TTTuu", ""),
    "prmt": ("TTTT", ""),
    "lop3": ("TTTTu", ""),
    "selp": ("TTTp", ""),
}
SPACES = {
    "global": "GLOBAL",
    "shared": "SHARED",
    "local": "LOCAL",
    "param": "PARAM",
    "const": "GENERIC",
}
IGNORED = {
    "volatile",
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "weak",
    "gpu",
    "cta",
    "sys",
    "nc",
    "ca",
    "cg",
    "cs",
    "cv",
    "wb",
    "wt",
    "lu",
    "aligned",
    "L1::no_allocate",
    "L1::evict_last",
    "L1::evict_first",
    "L2::cache_hint",
    "L2::64B",
    "L2::128B",
    "L2::256B",
}
# no result
NOTHING = ("prefetch", "prefetchu", "griddepcontrol", "nanosleep", "membar", "fence", "discard")
SPECIAL = {
    "%laneid": "t.lane",
    "%warpid": "(t.number / 32)",
    "%smid": "0u",
    "%nsmid": "processors()",
    **dict.fromkeys(("%clock", "%clock64", "%globaltimer"), "++t.launch->clock"),
    "%lanemask_eq": "(1u << t.lane)",
    "%lanemask_lt": "((1u << t.lane) - 1)",
    "%lanemask_le": "((2u << t.lane) - 1)",
    "%lanemask_gt": "~((2u << t.lane) - 1)",
    "%lanemask_ge": "~((1u << t.lane) - 1)",
}
_PLACES = {
    "tid": "t.at",
    "ntid": "t.launch->block",
    "ctaid": "t.block->at",
    "nctaid": "t.launch->grid",
}
SPECIAL |= {
    f"%{name}.{axis}": f"{place}.{axis}" for name, place in _PLACES.items() for axis in "xyz"
}
INFIX = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
BOOLEAN = {"and": "&&", "or": "||", "xor": "!="}
MMA = {"f16": "f16", "bf16": "bf16", "tf32": "f32", "s8": "s8", "u8": "u8"}


class UnknownPtx(Exception):
    pass


class CompilerError(Exception):
    """The host compiler failed; its messages."""


def size_of(kind: str) -> int:
    return SIZES.get(kind) or SIZES["x2" if kind[0] == "e" else kind.lstrip("bufs")]


class Kernel:
    """The C++ of one .entry."""

    def __init__(self, symbol: str, variables: dict[str, str]) -> None:
        self.symbol, self.variables, self.shared = symbol, dict(variables), 0
        self.declared: list[str] = []
        self.code: list[str] = []
        self.parameters: list[str] = []  # size and alignment
        self.types: dict[str, str] = {}  # of registers, by what their names begin with
        self.scoped: set[str] = set()  # registers that inline code declares, in braces of its own
        self.labels: set[str] = set()  # that came before
        self.depth = 0
        self.scopes = 0  # how often inline code has begun
        self.line = 0

    # ---- operands ----

    def value(self, text: str, kind: str) -> str:
        """An operand read as a C++ type."""
        text = text.strip()
        if text.startswith("!"):
            return f"!{self.value(text[1:], kind)}"
        if text in SPECIAL:
            return f"static_cast<{kind}>({SPECIAL[text]})"
        if text.startswith("%") or text in self.scoped:
            known = self.type_of(text)
            plain = kind == known or kind == "bool"
            return (
                register(text)
                if plain
                else (
                    f"{kind}({register(text)})"
                    if narrows(known, kind)
                    else f"as<{kind}>({register(text)})"
                )
            )
        if text in self.variables:
            return f"as<{kind}>({self.variables[text]})"
        if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
            return f"literal<{kind}>(0x{found[1] or found[2]}ull)"
        if re.fullmatch(r"-?\d+U?|-?0[xX][0-9a-fA-F]+U?", text):
            number = int(text.rstrip("U"), 0)
            if kind == "bool":
                return str(bool(number)).lower()
            return (
                f"{kind}({number & (1 << 64) - 1:#x}ull)"
                if kind[0] in "us"
                else f"literal<{kind}>({number & (1 << 64) - 1:#x}ull)"
            )
        if kind == "f32" and re.fullmatch(r"\d+\.\d*", text):
            return f"{text}f"
        raise UnknownPtx(f"operand {text!r}")

    def type_of(self, text: str) -> str:
        name = text.lstrip("%")
        return self.types.get(name) or self.types[name.rstrip("0123456789")]

    def put(self, to: str, value: str, kind: str) -> str:
        """A value of a C++ type into a register."""
        known = self.type_of(to)
        return (
            f"{register(to)} = {value};"
            if known == kind or narrows(kind, known)
            else f"put({register(to)}, {value});"
        )

    def address(self, text: str) -> str:
        base, sign, offset = re.fullmatch(
            r"\[\s*([^\s+\]]+?)\s*(?:(\+)\s*(-?\d+))?\s*\]", text.strip()
        ).groups()  # type: ignore[union-attr]
        at = self.variables.get(base) or f"u64({register(base)})"
        return f"({at} + {offset}ll)" if sign else at

    def add(self, text: str) -> None:
        """An instruction, or what declares registers and variables, maybe with braces before it."""
        while found := re.match(r"[{}]|(\$?\w+):(?!:)", text):
            if found[1]:
                self.labels.add(self.label(found[1]))
                self.code.append(f"{self.label(found[1])}:;")
            else:
                self.depth += 1 if text[0] == "{" else -1
                self.scopes += text[0] == "{"
                self.code += [text[0]] if self.depth > 1 or text[0] == "}" else []
            text = text[found.end() :].strip()
        if not text or text.startswith(".pragma"):
            return
        if found := re.match(r"\.reg\s+\.(\w+)\s+(.+)", text):
            self.add_registers(found[1], found[2].split(","))
        elif found := re.match(
            r"\.(shared|local)\s+\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?", text
        ):
            size = size_of(found[3]) * int(found[5] or 1)
            self.add_variable(found[1], int(found[2]), found[4], size)
        else:
            condition = re.match(r"@(!?)%?(\w+)\s+", text)
            name, *rest = text[condition.end() if condition else 0 :].split(None, 1)
            when = f"if ({condition[1]}{condition[2]}_) " if condition else ""
            self.code.append(
                f"{when}{self.statement(name, split(rest[0] if rest else ''))}  // {text}"
            )

    def add_registers(self, type_: str, names: list[str]) -> None:
        kind = (
            "bool"
            if type_ == "pred"
            else type_
            if type_ in ("f32", "f64")
            else f"u{8 * size_of(type_)}"
        )
        for one in names:
            name, _, count = one.strip().lstrip("%").partition("<")
            each = (
                ", ".join(f"{name}{n}_{{}}" for n in range(int(count[:-1])))
                if count
                else f"{name}_{{}}"
            )
            self.types[name] = kind
            if self.depth > 1:
                self.scoped.add(name)
            (self.code if self.depth > 1 else self.declared).append(f"{kind} {each};")

    def add_variable(self, space: str, align: int, name: str, size: int) -> None:
        if space == "local":
            self.declared.append(f"alignas({align}) u8 v_{name}[{size}];")
            self.variables[name] = f"u64(v_{name})"
        else:
            at = -(-self.shared // align) * align
            self.variables[name] = f"(u64(t.block->shared) + {at})"
            self.shared = at + size

    # ---- instructions ----

    def statement(self, name: str, operands: list[str]) -> str:
        base, *mods = name.split(".")
        handler = getattr(self, f"do_{base}", None)
        if handler:
            return str(handler(mods, operands))
        if base in NOTHING:
            return ";"
        if mods and f"{base}.{mods[0]}" in ARITHMETIC:
            base, mods = f"{base}.{mods[0]}", mods[1:]
        if base not in ARITHMETIC:
            raise UnknownPtx("instruction")
        signature, allowed = ARITHMETIC[base]
        kind = NAMES[mods.pop()]
        flags = self.flags(mods, allowed)
        kinds = {"T": kind, "W": WIDER.get(kind, ""), "u": "u32", "p": "bool"}
        given = [
            self.value(one, kinds[letter])
            for one, letter in zip(operands[1:], signature[1:], strict=True)
        ]
        # as C++ has it: less to compile
        if base in INFIX and flags == "0" and kind in ("u32", "s32", "u64", "s64", "f32"):
            return self.put(operands[0], f"{kind}({given[0]} {INFIX[base]} {given[1]})", kind)
        return self.put(
            operands[0],
            f"{base.replace('.', '_')}_<{kind}, {flags}>({', '.join(given)})",
            kinds[signature[0]],
        )

    @staticmethod
    def flags(mods: list[str], allowed: str) -> str:
        if set(mods) - set(allowed.split()):
            raise UnknownPtx("modifier")
        return "|".join(FLAGS[one] for one in mods) or "0"

    def do_mov(self, mods: list[str], operands: list[str]) -> str:
        (kind,) = mods
        to, source = operands
        if to.startswith("{"):
            parts = inside(to)
            bits, width = 8 * size_of(kind), 8 * size_of(kind) // len(parts)
            each = [
                f"put({register(one)}, u{width}(whole >> {width * n}));"
                for n, one in enumerate(parts)
                if one != "_"
            ]
            return f"{{ auto whole = {self.value(source, f'u{bits}')}; {' '.join(each)} }}"
        if source.startswith("{"):
            parts = inside(source)
            bits, width = 8 * size_of(kind), 8 * size_of(kind) // len(parts)
            each = [
                f"u{bits}({self.value(one, f'u{width}')}) << {width * n}"
                for n, one in enumerate(parts)
            ]
            return f"put({register(to)}, {' | '.join(each)});"
        return self.put(to, self.value(source, NAMES[kind]), NAMES[kind])

    def do_cvta(self, mods: list[str], operands: list[str]) -> str:
        return self.put(operands[0], self.value(operands[1], NAMES[mods[-1]]), NAMES[mods[-1]])

    def memory(self, mods: list[str]) -> tuple[str, int, str]:
        """The space, how many, and of what."""
        kind = mods.pop()
        count = int(mods.pop()[1]) if mods and mods[-1] in ("v2", "v4") else 1
        space = "GENERIC"
        for one in mods:
            if one.partition("::")[0] in SPACES:
                space = SPACES[one.partition("::")[0]]
            elif one not in IGNORED:
                raise UnknownPtx("modifier")
        return space, count, kind

    def do_ld(self, mods: list[str], operands: list[str]) -> str:
        thread = "poll(t)" if {"volatile", "relaxed", "acquire"} & set(mods) else "t"
        space, count, kind = self.memory(mods)
        to = inside(operands[0]) if count > 1 else operands[:1]
        at = (
            f"touch({thread}, {self.address(operands[1])}, {count * size_of(kind)}, {space}, READ,"
            f" {self.line})"
        )
        if count == 1:
            return self.put(to[0], f"load<{NAMES[kind]}>({at})", NAMES[kind])
        return (
            f"{{ const u8* at = {at}; "
            + " ".join(
                f"put({register(one)}, load<{NAMES[kind]}>(at, {n}));"
                for n, one in enumerate(to)
                if one != "_"
            )
            + " }"
        )

    def do_st(self, mods: list[str], operands: list[str]) -> str:
        space, count, kind = self.memory(mods)
        given = inside(operands[1]) if count > 1 else operands[1:2]
        at = (
            f"touch(t, {self.address(operands[0])}, {count * size_of(kind)}, {space}, WRITE,"
            f" {self.line})"
        )
        return (
            f"{{ u8* at = {at}; "
            + " ".join(
                f"store(at, {n}, {self.value(one, NAMES[kind])});" for n, one in enumerate(given)
            )
            + " }"
        )

    def do_atom(self, mods: list[str], operands: list[str]) -> str:
        vector = "v4" if "v4" in mods else "v2" if "v2" in mods else ""
        *mods, kind = [one for one in mods if one != "noftz"]
        action = next(
            one
            for one in mods
            if one in ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
        )
        space, _, _ = self.memory([*(one for one in mods if one not in (action, vector)), kind])
        type_, size, (to, place, *given) = NAMES[kind], size_of(kind), operands
        if vector:
            values = inside(given[0])
            each = " ".join(
                f"store(at, {n}, add_<{type_}, 0>(load<{type_}>(at, {n}),"
                f" {self.value(one, type_)}));"
                for n, one in enumerate(values)
            )
            return (
                f"{{ u8* at = touch(t, {self.address(place)}, {size * len(values)}, {space}, WRITE,"
                f" {self.line}); {each} }}"
            )
        values = [self.value(one, type_) for one in given]
        new = {
            "exch": values[0],
            "cas": f"old == {values[0]} ? {values[-1]} : old",
            "inc": f"old >= {values[0]} ? 0 : old + 1",
            "dec": f"old == 0 || old > {values[0]} ? {values[0]} : old - 1",
        }.get(action) or f"{action}_<{type_}, 0>(old, {values[0]})"
        at = self.address(place)
        thread = "t" if to == "_" else "poll(t)"
        read, write = (
            f"touch({thread}, {at}, {size}, {space}, {access}, {self.line});"
            for access in ("READ", "WRITE")
        )
        keep = "" if to == "_" else f"put({register(to)}, old);"
        return (
            f"{{ {read} u8* at = {write} const auto old = load<{type_}>(at); store(at, 0,"
            f" {type_}({new})); {keep} }}"
        )

    def do_red(self, mods: list[str], operands: list[str]) -> str:
        return self.do_atom(mods, ["_", *operands])

    def do_setp(self, mods: list[str], operands: list[str]) -> str:
        comparison, *middle, kind = [one for one in mods if one != "ftz"]
        name, type_ = (
            {"num": "NUM", "nan": "NOTNUM"}.get(comparison, comparison.upper()),
            NAMES[kind],
        )
        left, right = (self.value(one, type_) for one in operands[1:3])
        plain = comparison in COMPARISONS and (
            type_[0] in "us" or (type_ == "f32" and comparison != "ne")
        )
        found = (
            f"{left} {COMPARISONS[comparison]} {right}"
            if plain
            else f"compared<{name}, {type_}>({left}, {right})"
        )
        if plain and not middle and "|" not in operands[0]:
            return f"{register(operands[0])} = {found};"
        combined = f" {BOOLEAN[middle[0]]} {self.value(operands[3], 'bool')}" if middle else ""
        each = [
            f"{register(one)} = {truth}{combined};"
            for one, truth in zip(operands[0].split("|"), ("yes", "!yes"), strict=False)
            if one != "_"
        ]
        return f"{{ const bool yes = {found}; {' '.join(each)} }}"

    def do_slct(self, mods: list[str], operands: list[str]) -> str:
        kind, by = NAMES[mods[-2]], NAMES[mods[-1]]
        return (
            f"put({register(operands[0])}, {self.value(operands[3], by)} >= 0 ?"
            f" {self.value(operands[1], kind)} : {self.value(operands[2], kind)});"
        )

    def do_testp(self, mods: list[str], operands: list[str]) -> str:
        test = {
            "finite": "isfinite",
            "infinite": "isinf",
            "notanumber": "isnan",
            "normal": "isnormal",
        }[mods[0]]
        return f"{register(operands[0])} = std::{test}({self.value(operands[1], NAMES[mods[1]])});"

    def do_cvt(self, mods: list[str], operands: list[str]) -> str:
        *mods, to, source = mods
        flags = self.flags(mods, "rn rz rm rp rni rzi rmi rpi ftz sat satfinite relu")
        given = ", ".join(self.value(one, NAMES[source]) for one in operands[1:])
        return (
            f"put({register(operands[0])},"
            f" cvt_{'pair_' if source.endswith('x2') else ''}<{NAMES[to]}, {NAMES[source]},"
            f" {flags}>({given}));"
        )

    def do_dp4a(self, mods: list[str], operands: list[str]) -> str:
        kinds = ", ".join({"u32": "u8", "s32": "s8"}[one] for one in mods)
        given = ", ".join(
            self.value(one, kind)
            for one, kind in zip(operands[1:], ("u32", "u32", "s32"), strict=True)
        )
        return f"put({register(operands[0])}, dp4a_<{kinds}>({given}));"

    def label(self, name: str) -> str:
        """In C++. What inline code has in its braces is its own."""
        own = f"_{self.scopes}" if self.depth > 1 and name[0] != "$" else ""
        return "L" + re.sub(r"\W", "_", name) + own

    def do_bra(self, _: list[str], operands: list[str]) -> str:
        place = self.label(operands[0])
        loops = f"turn(t, {self.line}); " if place in self.labels else ""
        return f"{{ {loops}goto {place}; }}"

    def do_ret(self, _: list[str], __: list[str]) -> str:
        return "return;"

    do_exit = do_ret

    def do_trap(self, _: list[str], __: list[str]) -> str:
        return f'fault(t, {self.line}, "a trap");'

    def do_createpolicy(self, _: list[str], operands: list[str]) -> str:
        return f"{register(operands[0])} = 0;"

    # ---- what threads do together ----

    def do_bar(self, mods: list[str], operands: list[str]) -> str:
        mods = [one for one in mods if one not in ("cta", "aligned")]
        if mods == ["warp", "sync"]:
            return f"bar_warp_sync(t, {self.value(operands[0], 'u32')}, {self.line});"
        if mods not in (["sync"], ["arrive"]):
            raise UnknownPtx("barrier")
        return (
            f"bar_{mods[0]}(t, {self.value(operands[0], 'u32')},"
            f" {self.value(operands[1], 'u32') if len(operands) > 1 else 0}, {self.line});"
        )

    do_barrier = do_bar

    def do_shfl(self, mods: list[str], operands: list[str]) -> str:
        to, _, inside_ = operands[0].partition("|")
        value, by, clamp, mask = (self.value(one, "u32") for one in operands[1:])
        done = (
            f"u32 got; const bool in = shfl<{mods[1].upper()}>(t, got, {value}, {by}, {clamp},"
            f" {mask}, {self.line}); put({register(to)}, got);"
        )
        return f"{{ {done} {f'{register(inside_)} = in;' if inside_ else '(void)in;'} }}"

    def do_vote(self, mods: list[str], operands: list[str]) -> str:
        found = (
            f"vote<{mods[1].upper()}>(t, {self.value(operands[1], 'bool')},"
            f" {self.value(operands[2], 'u32')}, {self.line})"
        )
        return (
            f"put({register(operands[0])}, {found if mods[1] == 'ballot' else f'bool({found})'});"
        )

    def do_activemask(self, _: list[str], operands: list[str]) -> str:
        return f"put({register(operands[0])}, activemask(t, {self.line}));"

    def do_match(self, mods: list[str], operands: list[str]) -> str:
        if mods[0] != "any":
            raise UnknownPtx("match")
        return (
            f"put({register(operands[0])}, match_any(t, {self.value(operands[1], NAMES[mods[-1]])},"
            f" {self.value(operands[2], 'u32')}, {self.line}));"
        )

    def do_redux(self, mods: list[str], operands: list[str]) -> str:
        kind = NAMES[mods[-1]]
        return (
            f"put({register(operands[0])}, redux(t, {self.value(operands[1], kind)},"
            f" {self.value(operands[2], 'u32')}, {mods[1]}_<{kind}, 0>, {self.line}));"
        )

    def do_ldmatrix(self, mods: list[str], operands: list[str]) -> str:
        if "m8n8" not in mods or mods[-1] != "b16":
            raise UnknownPtx("shape")
        to = inside(operands[0])
        template = f"{len(to)}, {str('trans' in mods).lower()}"
        outs = ", ".join(f"m{n}" for n in range(len(to)))
        done = (
            f"u32 {outs}; ldmatrix<{template}>(t, {self.address(operands[1])}, {self.line},"
            f" {outs});"
        )
        return (
            f"{{ {done} {' '.join(f'put({register(one)}, m{n});' for n, one in enumerate(to))} }}"
        )

    def do_movmatrix(self, mods: list[str], operands: list[str]) -> str:
        if mods != ["sync", "aligned", "m8n8", "trans", "b16"]:
            raise UnknownPtx("shape")
        value = f"movmatrix(t, {self.value(operands[1], 'u32')}, {self.line})"
        return f"put({register(operands[0])}, {value});"

    def do_mma(self, mods: list[str], operands: list[str]) -> str:
        shape = re.fullmatch(r"m16n8k(\d+)", next(one for one in mods if one.startswith("m16")))
        sum_, left, right, _ = mods[-4:]
        if (
            not shape
            or mods[-1] != sum_
            or (left != right and {left, right} != {"u8", "s8"})
            or sum_ not in ("f32", "s32")
            or left not in MMA
        ):
            raise UnknownPtx("mma")
        d, a, b, c = (inside(one) for one in operands)
        named = (("a", a, "u32"), ("b", b, "u32"), ("c", c, sum_))
        a_, b_, c_ = (
            f"{kind} {name}[] = {{{', '.join(self.value(one, kind) for one in part)}}};"
            for name, part, kind in named
        )
        call = (
            f"mma<{MMA[left]}, {MMA[right]}, {sum_}, {shape[1]}, {len(a)}, {len(b)}>"
            f"(t, d, a, b, c, {self.line});"
        )
        return (
            f"{{ {a_} {b_} {c_} {sum_} d[4]; {call}"
            f" {' '.join(f'put({register(one)}, d[{n}]);' for n, one in enumerate(d))} }}"
        )

    def do_cp(self, mods: list[str], operands: list[str]) -> str:
        if mods == ["async", "commit_group"]:
            return "++t.group;"
        if mods == ["async", "wait_group"]:
            return f"cp_async_wait(t, {operands[0]}, {self.line});"
        if mods == ["async", "wait_all"]:
            return f"cp_async_wait(t, -1, {self.line});"
        bulk = "async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        if ".".join(mods).removesuffix(".L2::cache_hint") == bulk:
            to, source, size, barrier, *_ = operands
            return (
                f"cp_async_bulk(t, {self.address(to)}, {self.address(source)},"
                f" {self.value(size, 'u32')}, {self.address(barrier)}, {self.line});"
            )
        if mods[:1] != ["async"] or mods[1] not in ("ca", "cg"):
            raise UnknownPtx("copy")
        to, source, size, *of = operands[: -1 if "L2::cache_hint" in mods else None]
        return (
            f"cp_async(t, {self.address(to)}, {self.address(source)}, {size},"
            f" {self.value(of[0] if of else size, 'u32')}, {self.line});"
        )

    def do_mbarrier(self, mods: list[str], operands: list[str]) -> str:
        plain = IGNORED | {"shared", "shared::cta", "cluster", "b64"}
        action = ".".join(one for one in mods if one not in plain)
        if action == "init":
            count = self.value(operands[1], "u32")
            return f"mbarrier_init(t, {self.address(operands[0])}, {count}, {self.line});"
        if action in ("arrive", "arrive.expect_tx") and operands[0] == "_":
            given = self.value(operands[2], "u32") if len(operands) > 2 else "1"
            count, size = ("1", given) if action == "arrive.expect_tx" else (given, "0")
            return f"mbarrier_arrive(t, {self.address(operands[1])}, {count}, {size}, {self.line});"
        if action in ("try_wait.parity", "test_wait.parity"):
            return (
                f"{register(operands[0])} = mbarrier_try_wait(t, {self.address(operands[1])},"
                f" {self.value(operands[2], 'u32')}, {self.line});"
            )
        raise UnknownPtx("mbarrier")


def register(name: str) -> str:
    return f"{name.strip().lstrip('%')}_"


def narrows(from_: str, to: str) -> bool:
    """Whether C++ converts integers of one type to another by their low bits, and as PTX does."""
    return from_[0] in "us" and to[0] in "us" and size_of(to) <= size_of(from_)


def inside(braces: str) -> list[str]:
    return [one.strip() for one in braces.strip().strip("{}").split(",")]


def split(text: str) -> list[str]:
    """Operands: what commas separate that are in no braces."""
    return [
        one.strip() for one in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", text) if one.strip()
    ]


_ENTRY = re.compile(r"(?:\.weak|\.visible)?\s*\.entry\s+(\w+)\s*\(")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.\w?(\d+)\s+(\w+)(?:\[(\d+)\])?")
_VARIABLE = re.compile(
    r"(?:\.visible|\.weak|\.extern)?\s*\.(global|const|shared)\s+\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*(?:=\s*(.+?))?;"
)
_HEAD = (
    ".version",
    ".target",
    ".address_size",
    ".minnctapersm",
    ".maxnreg",
    ".reqntid",
    ".pragma",
    ".loc",
    ".file",
)


class Module:
    """The C++ of a PTX text, put together line by line."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.code: list[str] = []
        self.ranges: list[str] = []
        self.kernels: list[str] = []
        self.kernel: Kernel | None = None
        self.most_threads = 0

    def take(self, statement: str, number: int) -> str:
        """What is left of a statement, to which the next line is added."""
        if not statement or statement.split(None, 1)[0] in _HEAD:
            return ""
        if statement.startswith(".section"):  # names of functions, for a debugger
            return "" if statement.endswith("}") else statement
        if self.kernel is None:
            return self.outside(statement)
        if found := re.match(r"\.maxntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?$", statement):
            self.most_threads = int(found[1]) * int(found[2] or 1) * int(found[3] or 1)
            return ""
        if statement == "}" and self.kernel.depth == 1:
            self.end()
            return ""
        if not statement.endswith((";", "}", "{", ":")):
            return statement
        self.kernel.line = number
        for one in filter(None, (part.strip() for part in statement.split(";"))):
            self.kernel.add(one)
        return ""

    def outside(self, statement: str) -> str:
        if found := _ENTRY.match(statement):
            if ")" in statement:
                self.kernel, self.most_threads = Kernel(found[1], self.variables), 0
                for n, (align, size, name, count) in enumerate(_PARAMETER.findall(statement)):
                    self.kernel.parameters.append(
                        f"{{{int(size) // 8 * int(count or 1)}, {align or int(size) // 8}}}"
                    )
                    self.kernel.variables[name] = f"u64(t.launch->parameters[{n}])"
            return "" if ")" in statement else statement
        if not statement.endswith(";"):
            return statement
        found = _VARIABLE.match(statement)
        if not found:
            raise UnknownPtx(statement[:200])
        space, align, kind, name, count, value = found.groups()
        if space == "shared":
            self.variables[name] = "SHARED_END"
        else:
            numbers = ", ".join(literal(one, kind) for one in inside(value)) if value else ""
            self.code.append(
                f"alignas({align}) static {NAMES[kind]} v_{name}[{count or 1}] = {{{numbers}}};"
            )
            self.variables[name] = f"u64(v_{name})"
            self.ranges.append(f"{{u64(v_{name}), u64(v_{name}) + sizeof v_{name}}}")
        return ""

    def end(self) -> None:
        kernel, self.kernel = self.kernel, None
        assert kernel
        shared = kernel.shared + 15 & ~15  # what is dynamic begins behind
        body = "\n".join([*kernel.declared, *kernel.code]).replace(
            "SHARED_END", f"(u64(t.block->shared) + {shared})"
        )
        self.code.append(f"static void body_{kernel.symbol}(Thread& t) {{\n{body}\n}}")
        self.kernels.append(
            f'{{"{kernel.symbol}", body_{kernel.symbol}, {shared},'
            f" {{{', '.join(kernel.parameters)}}}, {self.most_threads}}}"
        )


def translate(text: str) -> str:
    """The C++ of a module.

    Raises:
        UnknownPtx: something in it is not known here.
    """
    module, statement = Module(), ""
    for number, raw in enumerate(text.split("\n"), 1):
        line = re.sub(r"//.*", "", raw).strip()
        try:
            statement = module.take(f"{statement} {line}".strip(), number)
        except (UnknownPtx, KeyError, ValueError, AttributeError, StopIteration) as error:
            where = module.kernel.symbol if module.kernel else "the module"
            raise UnknownPtx(
                f"{where}, line {number}: {line}: {type(error).__name__} {error}"
            ) from error
    foot = FOOT.replace("TABLE", ",\n".join(module.kernels)).replace(
        "RANGES", ", ".join(module.ranges)
    )
    return "\n".join(['#include "device.h"', *module.code, foot])


def literal(text: str, kind: str) -> str:
    text = text.strip()
    return (
        f"literal<{NAMES[kind]}>(0x{text[2:]}ull)"
        if text[:2].lower() in ("0f", "0d")
        else f"{NAMES[kind]}({text}ll)"
    )


FOOT = """
static const Kernel kernels[] = {TABLE};
extern "C" int emulate(const char* symbol, const char* source, const Dim* grid, const Dim* block,
                       u64 shared_bytes, int cooperative, void** given, u8* packed,
                       const Range* ranges, u64 count, char* error, size_t error_size) {
  static const std::vector<Range> variables = {RANGES};
  for (const Kernel& one : kernels)
    if (!strcmp(one.symbol, symbol))
      return run(one, source, *grid, *block, shared_bytes, cooperative, given, packed, ranges,
                 count, variables, error, error_size) ? 0 : 1;
  return -1;
}
"""


def digest(text: str, compiler: str) -> str:
    """Of all that decides the library of a PTX text."""
    here = Path(__file__)
    own = (path.read_text() for path in (here, here.with_name("device.h")))
    parts = [text, *own, _output([compiler, "--version"])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def compile_library(text: str, library: Path, compiler: str) -> None:
    """Translate a PTX text and compile it.

    Raises:
        UnknownPtx: an instruction is not emulated.
        CompilerError: the compiler failed.
    """
    source = library.with_suffix(".cpp")
    source.write_text(translate(text))
    flags = [
        "-std=c++17",
        "-O0",
        "-fwrapv",
        "-fno-strict-aliasing",
        "-ffp-contract=off",
        "-frounding-math",
        "-U_FORTIFY_SOURCE",
        "-w",
        "-fPIC",
        "-shared",
    ]
    _output([compiler, *flags, "-I", str(Path(__file__).parent), str(source), "-o", str(library)])
    source.unlink()


def read(code: Path) -> str:
    return code.read_text().rstrip("\0")


def main(folder: Path, code: Path, compiler: str) -> Path:
    """The library of a PTX file in a folder, with the PTX beside it."""
    text = read(code)
    library = folder / f"{digest(text, compiler)}.so"
    if not library.exists():
        library.with_suffix(".ptx").write_text(text)
        made = folder / f"{library.stem}.{os.getpid()}.so"
        compile_library(text, made, compiler)
        made.rename(library)
    return library


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompilerError(done.stderr)
    return done.stdout


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), Path(sys.argv[2]), os.environ.get("CXX", "g++")))
