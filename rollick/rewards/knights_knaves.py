"""The reward `knights_knaves`: which islander is a knight, which a knave.

    completion -- find_answer --> text -- read_roles --> {name: is a knight} --> 0.0 or 1.0

Forms that are read, in any order: `(1) Zoey is a knight`, `- Zoey: knight`, `Zoey is a knight, and
Ian is a knave.`, `Zoey and Ian are knights`, `Knights: Zoey, Ian`, `Zoey is not a knave`, `all are
knights`, `the others are knaves`. A name with two roles, or with none, is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from rollick.rewards.answers import after_thinking

Roles = dict[str, bool]
"""Whether each name is a knight."""

DECORATION = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed|quad|\\)|[*_`#$\\{}\"]")
SEPARATOR = re.compile(r"[.;!?\n]+")
HEDGE = re.compile(
    r"\b(?:or|either|if|whether|maybe|perhaps|might|may|could|possibly|assume|assuming|suppose"
    r"|supposing|unless|cannot|can't|says?|said|claims?|contradict\w*|not (?:all|every\w*|both))\b",
    re.IGNORECASE,
)
"""A clause with one of these words states no role."""
LINK = (
    r"(?:[\s:=|>→–—-]|\b(?i:is|are|was|were|must|be|a|an|the|both|all|each|also|thus|therefore"
    r"|indeed|definitely|actually|truly|certainly|only)\b){0,16}"
)
"""Between a name and its role. Bounded, as are lists of names: repetition must not take long."""
JOINT = r"\s*(?:,\s*(?i:and)\b|,|&|\b(?i:and)\b)\s*"
ALL = r"\b(?i:every(?:one|body)|they|all(?:\s+(?:of\s+them|\w+(?:\s+inhabitants)?))?)\b"
REST = r"\b(?i:others?|rest)\b"
ROLE_WORDS: Mapping[str, str] = {"knight": "knight", "knave": "knave"}


def knights_knaves(
    completion: str,
    names: Sequence[str],
    solution: Sequence[bool],
    knight_knave: Mapping[str, str] = ROLE_WORDS,
) -> float:
    """1.0 if the completion gives every name its role. Thinking is ignored. The columns are those
    of the dataset: names, solution (true is a knight) and, if there are other words for the roles,
    knight_knave."""
    if not names or len(names) != len(solution):
        raise ValueError(f"the row has {len(names)} names and {len(solution)} roles")
    expected = {name: bool(role) for name, role in zip(names, solution, strict=True)}
    reader = _make_reader(tuple(names), knight_knave["knight"], knight_knave["knave"])
    answer = find_answer(completion)
    if answer is None:
        return 0.0
    text, is_marked = answer
    return float((reader.read(text) if is_marked else reader.read_end(text)) == expected)


def find_answer(completion: str) -> tuple[str, bool] | None:
    """The text with the answer, and whether it is tagged; None if the thinking does not end."""
    response = after_thinking(completion)
    if response is None:
        return None
    begin = response.lower().rfind("<answer>")
    if begin < 0:
        return response, False
    end = response.lower().find("</answer>", begin)
    return response[begin + len("<answer>") : end if end >= 0 else None], True


class _RoleReader:
    """Reads the roles of these names in a text."""

    def __init__(self, names: tuple[str, ...], knight: str, knave: str) -> None:
        self._names = names
        self._knight = knight.lower()
        name = rf"\b(?:{'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})\b"
        self._name = re.compile(name)
        either = rf"(?i:{re.escape(knight)}|{re.escape(knave)})"
        self._role = re.compile(either)
        role, other_role = rf"\b({either})s?\b", rf"{LINK}+(?:(?i:not)\b{LINK}+)?{either}s?\b"
        more = rf"(?:{JOINT}{name}){{0,{len(names)}}}"
        group = rf"(?:{name}{more}|{ALL}|{REST})"
        self._statement = re.compile(
            rf"({group}){LINK}+(?:(\b(?i:not)\b){LINK}+)?{role}(?!{JOINT}{other_role})"
            rf"|{role}(?=[^,&]){LINK}({group})(?!{other_role})"
        )

    def read(self, text: str) -> Roles | None:
        """The role of each name that has one; None if a name has both."""
        clauses = SEPARATOR.split(_clean(text))
        roles: Roles = {}
        for clause in clauses:
            if not HEDGE.search(clause) and not self._add_clause(clause, roles):
                return None
        return roles

    def read_end(self, text: str) -> Roles | None:
        """The roles by the last lines that give one to every name."""
        lines = text.strip().splitlines()
        roles: Roles = {}
        for line in reversed(lines):
            added = self.read(line) if self._role.search(line) else {}
            if added is None or any(roles.get(name, role) != role for name, role in added.items()):
                return None
            roles |= added
            if len(roles) == len(self._names):
                break
        return roles

    def _add_clause(self, clause: str, roles: Roles) -> bool:
        """False if it contradicts the roles so far."""
        for match in self._statement.finditer(clause):
            before, negated, role_after, role_before, after = match.groups()
            names_knight = (role_after or role_before).lower() == self._knight
            is_knight = names_knight != bool(negated)
            for name in self._resolve_group(before or after, roles):
                if roles.setdefault(name, is_knight) != is_knight:
                    return False
        return True

    def _resolve_group(self, group: str, roles: Roles) -> list[str]:
        """The names that a group of names, `all` or `the others` means."""
        if named := self._name.findall(group):
            return named
        if re.fullmatch(REST, group):
            return [name for name in self._names if name not in roles]
        return list(self._names)


_make_reader = lru_cache(maxsize=1024)(_RoleReader)


def _clean(text: str) -> str:
    text = re.sub(r"n['’]t\b", " not", DECORATION.sub(" ", text))
    text = re.sub(r"[^\S\n]+|([:=|>→–—-])\1+", r" \1", text)
    # The number of a line, `1.` or `(1)`, is not the end of a sentence.
    return re.sub(r"^[ \t]*\(?\d{1,3}[.):]+", " ", text, flags=re.MULTILINE)
