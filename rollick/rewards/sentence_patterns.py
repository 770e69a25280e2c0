"""Patterns of sentences that are not the answer: they explain it, offer more, ask, or say that
there is none.

claims.py chooses with them the sentence whose value it reads; claim_patterns.py has the words
around that value.
"""

from __future__ import annotations

import re

# What explains the answer before it.

EXPLANATION = re.compile(
    r"^[ \t#*_>-]{0,12}(?:step\s+[0-9]{1,2}[:.]\s{0,4})?"
    r"(?:explanation|reasoning|justification|proof|check(?:ing)?|verif(?:y|ying|ication)|note|breakdown"
    r"|(?:(?:the|more|full)\s+)?details"
    r"|let(?:['’]s|\s+(?:me|us))\s+(?:double[- ])?(?:check|verify)"
    r"|here(?:['’]s|\s+is)\s+(?:why|how|(?:the|my)\s+[a-z-]+))\b[^\n]{0,40}?(?::|$)",
    re.IGNORECASE | re.MULTILINE,
)
"""Explains the answer above it."""
EXPLANATION_INLINE = re.compile(
    r"""(?<=[.!?*"'),;:—–-])\s{1,2}[*_]{0,2}(?:
        here(?:['’]s|\s+is)\s+(?:
            why
          | how\s+(?:i|we|you)\s+(?:got|get|found|know|can|did|solved|worked|calculated|arrived)
          | (?:a|the|my)\s+(?:[a-z-]+\s+)?
            (?:explanation|reasoning|breakdown|justification|logic|proof)
        )\b[^.:!?\n]{0,60}[.:!]
      | (?:the\s+)?(?:explanation|reason(?:ing)?|justification|breakdown)[*_]{0,2}
        (?:\s+is(?:\s+[a-z]+){1,3})?:
      | (?:but\s+)?(?:why|how\s+(?:do|did|can)\s+(?:i|we|you)\s+(?:know|get|find|tell))
        (?:\s+[a-z]+){0,4}\?
      | let\s+me\s+explain\b | to\s+explain\b | in\s+detail:
    )""",
    re.IGNORECASE | re.VERBOSE,
)
"""Explains the answer in the same line: `She has 27 left. Here's why: `."""
SUMMARY = re.compile(r"\bTL;?DR\b[*_]{0,2}(?:\s*:|\s[-–—]\s)(?:\s|[*_]++(?=\s))*+", re.IGNORECASE)
"""Begins a summary, before or after the solution: `TL;DR: `, `**TL;DR** — `."""
REASON = re.compile(
    r"""\W*(?:(?:this|that|it)(?:['’]s|\s+is)\s+because | the\s+reason\s+(?:is|for|why)
      | (?:i|we|you)\s+(?:got|found|obtained|arrived\s+at|(?:can\s+)?(?:know|see|tell))
        \s+(?:this|that|it)\s+(?:by|from|because)
      | to\s+(?:see|understand)\s+why
      | because(?=[^,]*$|.*,\s+(?:and|but|or|while|which|with)\b[^,]*$)
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""Begins a sentence that only explains the one before it. `Because she lost 3, she has 27` does
not: it has a main clause."""
REMARK = re.compile(r"\b(?:common\s+(?:mistake|error|misconception)|would\s+give)\b", re.IGNORECASE)
"""Says what would be wrong."""
EARLIER = re.compile(
    r"\b(?:would\s+have(?!\s+to\b)|(?:began|started)\s+with|at\s+first|initially|originally"
    r"|at\s+the\s+(?:start|beginning))\b",
    re.IGNORECASE,
)
"""Says what would be different or what the problem gives, unless it calculates a value."""
HYPOTHESIS = re.compile(
    r"""\W*if\b(?:
        .{0,200}?\b(?:also|instead)\b.{0,200}?\bwould\b
      | .{0,200}?\bwould\b.{0,200}?,\s+but\b
      | .{0,200}?,.{0,100}?\ba\s+different\s+(?:solution|answer|result|value|number|total)\b
    )""",
    re.IGNORECASE | re.VERBOSE,
)
"""Says what the answer to another problem is: `If you also bought socks, it would be $30.`"""
PARENTHESES = re.compile(r"\s*\([^()]*\)[.\s]*")

# What concludes a value after all.

CONCLUDES = re.compile(
    r"\b(?:so|therefore|thus|hence|total|altogether|finally|answer|result|leaves|left)\b|="
    r"|^[ \t]*2[.)]",
    re.IGNORECASE | re.MULTILINE,
)
"""May state a value other than the one at the beginning."""
CONCLUDES_VALUE = re.compile(
    r"""\b(?:so(?!\s+(?:that|far|many|much)\b)|therefore|thus|hence|altogether|finally|we\s+get
      |(?:which|that|this)\s+(?:gives|leaves|makes))\b[^.!?\n]{0,200}[0-9]
    | =\s?[^\s0-9]{0,12}[0-9]""",
    re.IGNORECASE | re.VERBOSE,
)
CONCLUDES_AMOUNT = re.compile(
    r"""\b(?:so(?!\s+(?:(?:that|far|many|much)|(?:i|we|you)\s+(?:add|subtract|take|remove|use))\b)|therefore|thus|hence|altogether|finally|we\s+get
      |in\s+(?:total|all|conclusion)|(?:total|answer|result)\s+(?:[a-z]+\s+){0,3}is
      |left|remain(?:s|ing)?|actually|(?:which|that|this)\s+(?:gives|leaves|makes))\b | =""",
    re.IGNORECASE | re.VERBOSE,
)
"""In a sentence with a value: it is that of a conclusion."""
CHECKS = re.compile(r"\b(?:(?:double[- ])?check|verif(?:y|ication)|confirm)", re.IGNORECASE)
"""Begins a check: its values conclude nothing."""

# What is said to the reader.

OFFER = re.compile(
    r"\W*(?:would\s+you\s+like|do\s+you\s+(?:want|have|need|understand)|shall\s+i|should\s+i|can\s+i"
    r"|is\s+there\s+anything|does\s+(?:that|this)\s+(?:help|make)|want\s+(?:me\s+)?to|let\s+me\s+know"
    r"|(?:for\s+example:?,?\s+)?what\s+if|how\s+about|ready\s+(?:for|to)|can\s+you)\b",
    re.IGNORECASE,
)
"""A closing remark to the reader."""
OFFERS_MORE = re.compile(
    r"""(?:^|(?<=[.!?*"')])\s)[^\w\n]{0,12}(?:(?:and|also|now|please),?\s+)?(?:
        would\s+you\s+(?:like|prefer|want|care) | would\s+it\s+help | feel\s+free\s+to
      | do\s+you\s+(?:want|need|have\s+(?:any|other|more|another))
      | want\s+(?:me\s+to|to\s+(?:try|see|practi[cs]e|learn|check)|another)
      | shall\s+i | (?:can|may)\s+i\s+(?:help|show|explain|do)
      | should\s+i\s+(?:also|show|explain|solve|walk|write|go|continue|give|check)
      | is\s+there\s+anything | ready\s+(?:for|to\s+try) | need\s+(?:any\s+)?(?:more\s+)?help
      | any\s+(?:other|more|further)\s+questions
      | let\s+me\s+know\b(?!\s+(?:the|how\s+m|what\s+the)|[^.!?\n]{0,80}\bbut\b)
      | i(?:['’]d|['’]m|\s+would|\s+am)\s+(?:also\s+)?(?:be\s+)?(?:happy|glad)\s+to
      | i\s+(?:can|could)\s+[^.!?\n]{0,80}\bif\s+you(?:['’]d)?\s+(?:like|want|wish|prefer)
      | if\s+you(?:['’]d|\s+would)?\s+(?:like|want|wish|prefer|need|have)\b[^.!?\n0-9]{0,80},\s
        (?:(?:just|please)\s+)?
        (?:i(?:['’]ll|\s+(?:can|could|will))|let\s+me\s+know|ask|tell\s+me|feel\s+free)
    )\b""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
"""Offers more than the answer. What follows belongs to the offer, unless it is the solution."""
REMARKS = (OFFERS_MORE, EXPLANATION, EXPLANATION_INLINE)
OTHER_TOPIC = re.compile(
    r"\b(?:also|too|another|other|more|else|next|try|check(?:ing)?|verif(?:y|ying|ication)|note"
    r"|proof)\b",
    re.IGNORECASE,
)
"""In a remark: what follows it is no solution of the problem."""
HINT = re.compile(r"\W*(?:hint|tip):", re.IGNORECASE)
INSTRUCTION = re.compile(
    r"\W*(?:then|now|next),?\s+(?:just\s+|you\s+(?:can|should|need\s+to)\s+)?"
    r"(?:multiply|divide|add|subtract|solve|compute|calculate|substitute)\b",
    re.IGNORECASE,
)
"""Leaves a step to the reader, unless it states a value."""
ASKS = re.compile(
    r"\b(?:how\s+(?:many|much|long|far|old|do|can|should)"
    r"|what\s+(?:is|are|was|were|does|do|should|would|comes))\b.*\?",
    re.IGNORECASE,
)
SUPPOSITION = re.compile(
    r"\W*(?:(?:now|so|then|first)\s+)?(?:suppose|assume|say|let\s+[a-z]+\s*(?:=|be\b|denote\b)"
    r"|let(?:['’]s|\s+us)\s+(?:call|say|assume|suppose|denote))[^,]*$",
    re.IGNORECASE,
)

# What says that there is no answer.

NO_ANSWER = re.compile(
    r"""\b(?:(?:enough|insufficient|more|additional|missing)\s+(?:information|data|details)
    |(?:can\s?not|can['’]t|could\s+not|couldn['’]t|impossible\s+to|unable\s+to|no\s+way\s+to)\s+(?:be\s+)?
     (?:tell|say|answer(?:ed)?|determined?|solved?|calculated?|known|(?:see|find)\s+(?:how|what))
    |(?:not\s+able\s+to\s+(?:give|find|solve))|almost\s+there|your\s+turn|tell\s+me\s+what
    |leave\s+(?:this|that|the)\s+(?:[a-z]+\s+)?(?:step|rest|calculation)
    |(?:not\s+sure|unclear|unsure)|(?:do\s+not|don['’]t)\s+know|clarify|clarification)\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""The values of this sentence are no answer."""
NO_SOLUTION = re.compile(
    r"""\W*(?:(?:so|thus|hence|therefore|then|but|however),?\s+)?
    (?:there\s+(?:is|are)|(?:the|this)\s+(?:[a-z]+\s+)?(?:equation|problem|system)\s+has)\s+no\s+
    (?:real\s+|valid\s+|possible\s+)?solutions?(?:\s+(?:because|since|as|to)\b|\s?[:;,—–-]|[\s*]*[.!]|[\s*]*$)
    (?!.*\b(?:so|thus|hence|therefore|except|unless)\b)""",
    re.IGNORECASE | re.VERBOSE,
)
"""Says that nothing solves the problem: the values after it were rejected."""
ONLY_GIVEN = re.compile(
    r"""\b(?:(?:i|we|you|one)\s+(?:can|could)\s+only\s+(?:say|tell|confirm)
      | (?:i|we)\s+only\s+(?:know|have\s+been\s+told)
      | (?:i|we)(?:['’]re|['’]m|\s+are|\s+am)\s+only\s+(?:told|given)
      | (?:problem|question|statement|text|it)\s+only\s+(?:tells|says|mentions|states)
      | (?:problem|question|statement|text)\s+only\s+gives
      | (?:gives|tells|told|given)\s+(?:us\s+|me\s+)only
      | all\s+(?:that\s+)?(?:i|we|you)\s+(?:can\s+)?(?:know|say|tell)
      | all\s+that(?:['’]s|\s+is)\s+(?:given|known|stated)
      | the\s+only\s+(?:thing|number|information|value|fact|figure)s?\s+(?:
            (?:that\s+)?(?:i|we)\s+(?:know|have|are\s+given)
          | (?:that\s+is\s+)?(?:given|known|stated|mentioned)
          | in\s+the\s+(?:problem|question|text)
        )
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""Says that a value is all that is given: `we only know that there are 27 rows`."""
_CANNOT = r"(?:can\s?not|can['’]t|could\s+not|couldn['’]t)"
_UNABLE = (
    r"(?:(?:unable|(?:not|[a-z]{2,6}n['’]t)\s+able|(?:im|not\s+)possible|no\s+way)"
    r"\s+(?:for\s+(?:me|us|anyone)\s+)?to)"
)
_FIND = r"(?:solve|answer|determine|calculate|compute|find|figure\s+out|work\s+out)"
_QUANTITY = (
    r"(?:answer|result|solution|problem|question|total|number|amount|cost|price|value"
    r"|information|data|details?)"
)
_UNLESS = (
    r"\b(?![^.!?\n]{0,60}\bbut\b"
    r"|\s+(?:[a-z]+\s+){0,4}(?:directly|yet|exactly|immediately|easily|at\s+first|by\s+[a-z]+ing)\b)"
)
"""After what is only a difficulty: `we cannot find it directly`, `… is not given, but …`."""
CANNOT_BE_FOUND = re.compile(
    rf"""(?:\b(?:{_CANNOT}|{_UNABLE})\s+{_FIND}\s+(?:this|that|it|the\s+(?:[a-z]+\s+)?{_QUANTITY})
      | \b(?:(?:i|we|you|one)\s+(?:[a-z]+\s+)?{_CANNOT}|{_UNABLE})\s+(?:
            {_FIND}\s+the | (?:[a-z]+\s+){{1,2}}(?:how|what|the\s+(?:[a-z]+\s+)?{_QUANTITY})
          | (?:answer|solve)(?=[.!,])
        )
      | \b{_CANNOT}\s+be\s+
        (?:determined|solved|answered|calculated|computed|known|worked\s+out|figured\s+out)
      | \b{_QUANTITY}\s+{_CANNOT}\s+be\s+(?:found|given)
      | \bsorry,?\s+(?:but\s+)?i\s+(?:am\s+not|{_CANNOT}|do\s+not|don['’]t)
      | \bi\s+(?:do\s+not|don['’]t)\s+know\s+(?:the\s+answer|how|what)
      | \b(?:unclear|not\s+clear)\s+(?:how|what)
    ){_UNLESS}""",
    re.IGNORECASE | re.VERBOSE,
)
"""Says that the answer cannot be found."""
DATA_MISSING = re.compile(
    rf"""(?:(?:not|n['’]t|no|without)\s+(?:[a-z]+\s+){{0,3}}
        (?:enough|sufficient)\s+(?:information|data|details)
      | \b(?:insufficient|missing|lacks?|needs?\s+(?:some\s+)?(?:more|additional|further))
        \s+(?:the\s+)?(?:information|data|details)
      | \b{_QUANTITY}\b[^.!?\n0-9]{{0,40}}\b(?:is|are|was|were)(?:
            \s+(?:unknown|missing)
          | (?:\s+not|n['’]t)\s+(?:given|known|stated|specified|provided|mentioned)
        )
      | \b(?:problem|question|statement|text)\s+is\s+(?:missing|unsolvable|incomplete|unanswerable)
      | \b(?:problem|question|statement|text|it)\s+(?:(?:does|did)(?:\s+not|n['’]t)|never)\s+
        (?:say|tell|state|mention|specify|give|provide|include|indicate)s?\s+(?:us\s+|me\s+)?how
      | \bi(?:['’]m|\s+am)\s+missing\s+(?:the|some|how|what)
    ){_UNLESS}""",
    re.IGNORECASE | re.VERBOSE,
)
"""Says that the problem does not give what is needed."""
_TELL = r"(?:tell|give|provide|share|specify|supply|state|send|let)"
_ASKED = r"(?:how|what|which|more|an?|its|each|any|the(?!\s+(?:[a-z]+\s+)?answer\b))"
ASKS_FOR_DATA = re.compile(
    rf"""(?:\b(?:could|would|will)\s+you|\b(?:please|kindly)|\A[^0-9]{{0,200}}\bcan\s+you)\s+
      (?:please\s+|kindly\s+)?(?:
          {_TELL}\s+(?:me\s+|us\s+)?(?:know\s+|with\s+)?{_ASKED}
        | mind\s+[a-z]+ing | (?:re|double-)?check\s+the\s+(?:problem|question)
      )\b
    | \b(?:can|could|would|will)\s+you\s+(?:please\s+)?clarify\b | \b(?:can|could|may)\s+i\s+ask\b
    | \b(?:if|once|when)\s+you\s+(?:can\s+)?{_TELL}\s+(?:me|us)\b
    | \A[^0-9]{{0,200}}\bdo\s+you\s+(?:have|know)\s+the\s+{_QUANTITY}\b
    | \A[^0-9.!?]{{0,80}}\bi\s+(?:still\s+)?need\s+(?:to\s+know|more|the\s+(?:cost|price|value))\b
    | \b(?:i|we|you)(?:['’]d|\s+would)\s+(?:still\s+|also\s+|first\s+)?need\s+
      (?:to\s+(?:know|be\s+told)(?!\s+that\b)|that|the\s+{_QUANTITY})\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""Asks the reader for what is needed. After a value, `can you tell me …` is an exercise for the
reader instead."""
UNANSWERED = (CANNOT_BE_FOUND, DATA_MISSING, ASKS_FOR_DATA)
