"""Patterns of the words around a value: what states it, denies it, or only mentions it.

claims.py reads sentences with them.
"""

from __future__ import annotations

import re

EMPHASIS = re.compile(
    r"(?<![\w*^\\)}\]])(\*{1,3}|_{1,3})(?=[^\s*_{])((?:(?!\1).){1,200}?)(?<=[^\s*_])\1(?![\w*_])"
)
"""Bold or italic text in Markdown."""
CLOSING_EMPHASIS = re.compile(r"(?<=[^\s*_])(?:\*\*|__)(?=[\s.,;:!?)]|$)")
"""Ends emphasis that began before the text."""
RESTATED = re.compile(
    r"(?<![0-9,.])([0-9][0-9,]*+(?:\.[0-9]+)?+)((?:\s[a-z]+){0,2})\s\(\s?\$?\1(?:\s[a-z]+)?\s?\)"
)
"""A number with the same number in parentheses: `27 (27)`."""
LEAD = re.compile(
    r"""(?:\s|[:,=~≈…]|\.{2,3}|\\approx(?![a-z])|(?:about|approximately|approx\.?|around|roughly|nearly|almost
    |exactly|precisely|simply|just|therefore|thus|hence|then|indeed|clearly|definitely|certainly|probably
    |actually|also|again|only|nothing\s+but|in\s+fact|equal\s+to|given\s+by|found\s+to\s+be|the\s+number
    |a\s+total\s+of)(?![a-zA-Z]))+""",
    re.IGNORECASE | re.VERBOSE,
)
"""Words before a value that do not change it."""
CORRECTED = re.compile(r"not\s+\S[^;]{0,200}?,?\s+but\s+(?:rather\s+)?(?=\S)", re.IGNORECASE)
DENIAL = re.compile(r"(?:not|never|neither|no|cannot|can't)\b", re.IGNORECASE)
_TAIL_WORDS = (
    r"because|since|as|when|where|whereas|which|while|so|if|for|after|before|due|given|assuming|with"
    r"|out\s+of|of\s+the|of\s+these|instead|rather|not|unless|though|although|but|that|is|are|was|were|in"
    r"|on|at|by(?=\s+[a-z])|and\s+(?:so|thus|hence|therefore|not|that|this)|i\.e\.?|e\.g\.?"
)
TAIL = re.compile(
    rf"""\s*(?: [,;—–-]?\s+(?:{_TAIL_WORDS})(?![\w'])
      | ;\s | \s[—–]\s
      | \s\(\s*(?:(?!or\b|mod\b)[a-z]{{2,}}|[≈=~]|[0-9$.,]+\s+(?!or\b)[a-z]{{2,}})
      | [.!]\s )""",
    re.IGNORECASE | re.VERBOSE,
)
"""Where the explanation after a value begins."""
TAKES_BACK = re.compile(r"\b(?:otherwise|wrong|incorrect|impossible|or\b.*[0-9])\b", re.IGNORECASE)

NUMBER = re.compile(
    r"""(?<![\w.^_{\\])(?<![0-9]:)[-+−]?(?:\\?[$€£]\s?)?
    (?: [0-9]{1,3}(?:(?:,|\\,|\{,\}|,\\!|[\u2009\u202f\u00a0])[0-9]{3})+(?![0-9])
      | [0-9]+ )?
    (?:\.[0-9]+)?(?:\s?/\s?[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?!\w))?\s?(?:\\?%)?""",
    re.VERBOSE,
)
GLUED = re.compile(
    r"(?:st|nd|rd|th|km|cm|mm|kg|mg|ml|m|g|l|L|mph|hrs?|mins?|ft|lbs?|°)?[²³]?(?![\w^])"
)
"""What may follow a number without a space."""
SCALE = re.compile(r"\s*(?:hundred|thousand|million|billion|trillion|dozen)s?\b", re.IGNORECASE)
UNIT = re.compile(
    r"\s?(?!in\s+\w)(?:(?:square|cubic|sq)\s+)?[a-zA-Z]+"
    r"(?:(?:\s*/\s*|\s+per\s+)[a-zA-Z]+)?(?:\^\{?[23]\}?)?(?!\w)"
)
DENIED_AFTER = re.compile(
    r"[^.;0-9]{0,40}\bbut\s+(?:it|that|this)\s+(?:is|was)(?:n['’]t|\s+not|\s+wrong)\b|"
    r"[^.;0-9]{0,40}\b(?:but|which|however,)\s+(?:(?:it|(?:that|this)(?:\s+[a-z]+)?)\s+)?(?:"
    r"does(?:\s+not|n['’]t)\s+(?:satisfy|work|fit|solve|hold|check\s+out)"
    r"|fails\b|is\s+(?:an?\s+)?extraneous)|"
    r"\s*times\s+(?:as|more|larger|bigger|greater|that|the)\b|"
    r"\s*(?:[a-z]+\s+){0,2}(?:is|are|was|were|would\s+be|ca|can|does"
    r"|do(?=(?:n['’]t|\s+not)\s+(?:work|fit|satisfy|hold)))"
    r"(?:n['’]t\b|not\b|[^.]{0,40}\bnot\s+quite\b|\s+(?:not|never|wrong|incorrect|impossible|too|excluded|known|given|possible)\b)",
    re.IGNORECASE,
)
IS_ANSWER = re.compile(
    r"\s*(?:[a-z]+\s+)?is\s+(?:the|my|our)\s+(?:final\s+|correct\s+)?(?:answer|result|solution)\b",
    re.IGNORECASE,
)
RELATION = re.compile(r"[\s$]*(?:[<>≠≤≥]|\\(?:neq?|geq?|leq?|lt|gt)(?![a-z]))")
UNSOLVED = re.compile(
    r"(?:^|[\s$])(?:[0-9]+\s*[a-zA-Z]|[a-zA-Z]\s*\^\s*\{?[0-9]+\}?)\s*="
    r"|(?:^|[\s$])(?:[0-9]*\s?[n-qt-z]\s*[-+*/]|[0-9.]+\s*[-+*/]\s*[0-9]*[n-qt-z]\b)[^=\n]{0,60}="
)
"""An equation that is not solved: `2x = 27`, `25x + 34 = 257`."""
UNIT_POWER = re.compile(r"([0-9]\$?\s?[a-zA-Z]{1,12})\s?\$\s?\^\s?\{?([23])\}?\s?\$")
"""A unit with its power in a formula: `27 m$^3$`."""
MARKS = re.compile(r"[ \t][\[(][0-9] marks?[\])](?=[ \t.]*$)", re.IGNORECASE | re.MULTILINE)
"""What a step is worth in an exam: `[1 mark]`."""
_POWER = r"(?:\^\{?[23]\}?|[²³])?"
_SHORT_UNIT = rf"(?:[ckd]?m|mm|[gslhLNWJVA]){_POWER}"
_TEXT_UNIT = rf"(?:\\[,;:! ]|[~\s]){{0,4}}\\(?:text|mathrm|mbox|rm)\s?\{{[^{{}}]{{0,30}}\}}{_POWER}"
OPERAND_UNIT = re.compile(
    rf"""(?<=[0-9]){_TEXT_UNIT}(?=\s?(?:[-+*×÷/·⋅−–]|\\(?:times|cdot|div)(?![a-z])))
    | (?P<operand>(?:
          [0-9]\s?(?:{_SHORT_UNIT}|{_TEXT_UNIT})\s?[-+−–]
        | [*×÷/·⋅] | \\(?:times|cdot|div) | \bx
      )\s?\$?[0-9][0-9.,]*+)
      (?: \s{_SHORT_UNIT} | {_TEXT_UNIT}
        | {_SHORT_UNIT}(?=\s?=\s?[0-9.,]+\s?{_SHORT_UNIT})
      )(?=\s?=)""",
    re.VERBOSE,
)
"""The unit of an operand, in LaTeX or before the equals sign. It is no unknown: `9 m × 3 m = `. A
letter that touches the operand, `2m + 3m = 27`, is a unit if the result has one, too."""
ASIDE = re.compile(
    r""",\s+which\s+(?:(?!is\b|are\b|was\b|were\b)[a-z]+)\s+(?:[^,.;:]|[.,](?=[0-9])){1,60},
      | \s\([^()a-z]*+(?:[a-z](?![a-z])[^()a-z]*+)*+[a-z]{2}[^()]*+\)
      | ,?\s+(?:because|since)\b(?:(?!,\s+(?:so|but)\b).)*
      | ,\s+which\s+(?:is|are|was|were|makes|means)\s+(?:[^\s0-9]*+[0-9]\S*+\s+)?(?:[a-z]+\s+){0,2}?
        (?:\S*[0-9]\s?%\s+of|more|less|fewer|under|over|above|below|within|enough|half|twice|larger|smaller|higher
        |lower|greater|older|younger|longer|shorter|times|exactly\s+the|the\s+same|reached|attained|achieved
        |mentioned|stated|known|expected|allowed|needed|required|when|where|what)\b.*
      | ,\s+[^\s0-9]*+[0-9]\S*+\s+of\s+(?:them|which|whom)\b.* | (?<=cents),\s+or\s+\$[0-9.]+
      | ,\s+[0-9]\S*\s+[a-z]+\s+and\s+[0-9]\S*\s+[a-z]+(?=[.\s]*$)
      | ,\s+or\s+[0-9]+\s+[a-z]+\s+and\s+[0-9]+\s+[a-z]+ | ,\s+who\b[^,]{1,80}, | ,\s+who\b.*
      | :\s+[^\s0-9]*+[0-9]\S*+\s+(?:[a-z]++[^.:]{0,200}\band\s+[^\s0-9]*+[0-9]
        |(?:plus|minus|times|from)\b).*""",
    re.IGNORECASE | re.VERBOSE,
)
"""A remark that says nothing about what the sentence states."""
_EQUATION_SIDE = r"[^=:;,(_□a-z\n]{0,40}"
_BLANK = r"(?:_{2,}+(?![0-9])|□)"
BLANK_EQUATION = re.compile(
    rf"(?:^|[:;,(])(?:{_EQUATION_SIDE}{_BLANK}{_EQUATION_SIDE}=|{_EQUATION_SIDE}={_EQUATION_SIDE}{_BLANK})"
    r"[^;]*"
)
"""An equation with a blank that the value before it fills: `27: ___ + 3 = 30`."""
_VERB = (
    r"(?<!who\s)\b(?:is|are|was|were|has|have|had|gets?|got|gives?|leaves?|left|makes?|needs?)\b"
)
_BOUND = rf"(?:(?!\band\b|{_VERB})[^0-9;]){{0,40}}[0-9][0-9.,]*"
BOUNDS = re.compile(
    rf"""\bbetween\s+{_BOUND}(?:(?!\band\b|{_VERB})[^0-9;]){{0,40}}\band\s+
    (?!(?:each|so|then|he|she|they|we|it|i|you|there|that|this)\b){_BOUND}(?:\s?(?:°\w?|%))?""",
    re.IGNORECASE | re.VERBOSE,
)
"""What a value before it is the distance of: `27 degrees between 3°F and 30°F`."""
UNFINISHED = re.compile(
    r"\b(?:and|then|or|the|an?|to|of|by|with|we|is|are|from|for|so|next|which|that|but|subtract|add"
    r"|multiply|divide)$",
    re.IGNORECASE,
)
EQUATION = re.compile(
    r"(?:[a-zA-Z]\w*|[^=+*/^<>0-9-]{1,60}|(?:\\text|\\mathrm)\{[^{}]*\}|[a-zA-Z ]+|[0-9.+*/() -]+)"
    r"\s*=([^=]+)"
)
"""An equation whose left side only names or computes the right side."""
NOT_STATED = re.compile(
    r"""(?: (?:\b(?:not|never|nor|neither|cannot|exclude|exclud\w+|reject\w*|discard\w*|eliminat\w*
          |rul\w+\s+out)|n['’]t)\s+(?:(?!but\b)[a-z]+\s+){0,6}
      | \b(?:rather\s+than|instead\s+of|other\s+than|except|without|unlike|than|out\s+of
          |(?:far|away|up|down)\s+from|among|asked\s+about|[0-9]+\s+of(?!\s+(?:them|us|you)\b)|of\s+(?:the|these|all|his|her|their|my)
          |to\s+(?:reach|make))\s+(?:(?!(?:is|are|was|equals|has|have|had|gets?)\b)[a-z]+\s+){0,3}
      | \bwould\s+(?:only\s+)?have\s+(?!to\b)(?:[a-z]+\s+){1,2}
      | \b(?:equation|eq|problem|question|exercise|step|figure|table|page|chapter)\.?\s*
      | (?<![a-z0-9+*/-])(?:[0-9]+\s*[a-z]|[a-z]\^\{?[0-9]+\}?)\s*=\s*
      | \b(?:at\s+(?:least|most)|over|under|above|below|exceeds?|between|up\s+to|within)\s+
      | \b(?:could|might|may|can)\s+(?:also\s+|well\s+|even\s+)?be\s+(?:[a-z]+\s+)?
      | \b(?:thought|believed|figured|expected)\b[^,.0-9]{0,60}
      | \b(?:subtract|deduct|add|multiply|divide)(?:s|ing)?\s+(?:by\s+)?
      | \b(?:problem|question)\s+(?:mentions|says|states|gives)\s+(?:[a-z]+\s+){0,2}
      | \b(?:perhaps|maybe|possibly|guess\w*(?:\s+of)?|try|trying|test|testing|half|half\s+of|twice
          |double|triple|times|(?:multiples?|factors?|powers?|root|third|quarter|percent)\s+of|%\s+of
          |(?:divis|divid|multipl)\w+\s+by)\s+
      | \bbetween\s+[^,;]{1,40}\band\s+
      | \b(?:if|unless|suppose|assum\w+|whether)\b[^,]{0,200}
      | (?:(?<![=-])[<>≠≤≥]=?|!=|\\(?:neq?|geq?|leq?|lt|gt)(?![a-z]))\s*
      | \b(?:plus|minus)\s+
      | \b(?:no\s+(?:es|son)|n['’]est\s+pas|nicht|kein\w*|não\s+é|non\s+è)\s+
      | (?:不是|并非|不等于)\s*
    )$""",
    re.IGNORECASE | re.VERBOSE,
)
"""A value after these words is denied, a bound or a condition. The text before the value ends with
one space, without the signs of OPENING."""
OPENING = " \t\n$*\\("
"""Signs between a word and its value."""
OPERAND = re.compile(
    r"[0-9a-z)}](?:\s*(?:(?<!\*)\*(?!\*)|[/×÷^+])|\s*\\(?:times|cdot|div)|\s+-|(?<=[0-9])-)"
    r"[\s$*\\(]*+$",
    re.IGNORECASE,
)
"""Before a value that is an operand: `3 * `."""
OPERATOR = re.compile(
    r":[0-9]|\s*(?:\*(?!\*)|[×÷^]|\\(?:times|cdot|div|pm)|[+-]\s*[0-9]"
    r"|(?:divided|multiplied)\s+by\b|(?:plus|minus|times)\s+\$?[0-9]|(?:squared|cubed)\b)"
)
"""After a number that is an operand, and not a value."""
UNKNOWN = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])")
ALIGNED = re.compile(r"\\(?:begin|end)\{(?:align|aligned|gather|split|eqnarray)\*?\}")
"""Begins or ends rows of equations."""
NAME = re.compile(r"\\?[a-zA-Z]+(?:_\w|\([a-z]\))?")
"""A formula that only names an unknown or a function: `k`, `f(x)`."""
RESIDUE = re.compile(r"\s*\\p?mod\s*(?:\{[^{}]*\}|\w)|\s*\(\s*(?:\\b?mod|mod)\b[^()]*\)")
"""After a residue: `3 \\pmod{7}`."""
THEREFORE = re.compile(r"\b(?:so(?!\s+(?:far|many|much)\b)|thus|hence|therefore)\s", re.IGNORECASE)
"""Begins the conclusion of a sentence, which replaces the values before it."""
ATTRIBUTE = re.compile(
    r"-[a-z]{2,}+(?!\s(?:[a-z]+\s)?(?:difference|gap|increase|decrease|rise|drop|change)\b)",
    re.IGNORECASE,
)
"""After a number that describes what is counted: `6-inch pencils`, and not how large it is."""
RESULT = re.compile(
    r"[0-9)%][a-z\s²³]{0,30}(?:[-+*/×÷–−]|x(?=\s?\$?[0-9])|\\(?:times|cdot|div))[^=\n]{0,80}=[\s$*\\(€£]*$",
    re.IGNORECASE,
)
"""Before the result of a calculation: `30 - 3 = `."""
ADJUNCT = re.compile(
    r"""\b(?:in|for|after|before|per|at|on|(?<!left\s)(?<!up\s)with|within|by|from|over|during|until
    |towards?|against|under|above|through|throughout|across|when|while|since|using|given|once
    |(?<!has\s)(?<!have\s)(?<!had\s)(?<!needs\s)(?<!need\s)(?<!up\s)to\s+(?!about|an?\b|the\b|exactly
     |be\b|approx|only\b|just\b|around|roughly|over\b|under\b|nearly)[a-z]+
    |of(?=\s+[$*]*$))\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""Begins a phrase whose numbers only say how, when or for whom: `in 5 days`."""
QUANTITY_OF = re.compile(
    r"\b(?:total|sum|cost|price|profit|amount|average|change|rate)\s+of\s+$", re.I
)
CLAUSE = re.compile(
    r"""[,;:()=] | (?<!to\s)(?<!that\s)(?<!which\s)(?<!who\s)
    \b(?:is|are|was|were|be|has|have|had|gets?|got|needs?|needed|costs?|pays?|paid|makes?|made|takes?
    |took|earns?|earned|equals?|leaves?|left|remains?|remained|sold|sells?|bought|buys?|gave|gives?|spent|spends?|saved|saves?|used|uses?|will|would|must|can|could|should)\b
      | \b(?:he|she|they|it|we|i|you|there)\s+(?:(?:now|still|also|then|[a-z]+ly)\s+)?[a-z]+\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""What ends such a phrase."""
POINT = re.compile(r"\b(?:at|when|for|where|with|if)\s+\$?[a-z]\s*=\s*[\s$*\\(]*$", re.IGNORECASE)
"""Before the argument of a function: `at x = `."""
CONDITION = re.compile(r"\s*(?:[a-z]+\s+){0,3}if\b", re.IGNORECASE)
"""After a value that `would be` so."""
KNOWN = re.compile(
    r"\bthe\s+(?:remaining|original|initial|first|last|other|whole|full|entire|same|next)"
    r"\s+[\s$*\\(]*$",
    re.IGNORECASE,
)
"""Before a number that was mentioned earlier."""
GIVEN = re.compile(
    r"(?:\b(?:the|these|those|all)"
    r"|(?<!\btake)(?<!\btakes)(?<!\btook)(?<!\bcost)(?<!\bcosts)(?<!\bleaves)(?<!\bleave)(?<!\bleft)"
    r"(?<!\bpays)(?<!\bpaid)(?<!\bpay)(?<!\bowes)(?<!\bowe)(?<!\bmakes)(?<!\bmake)\s(?:his|her|their|my|your|our))"
    r"\s+[\s$*\\(]*$",
    re.IGNORECASE,
)
"""Before a number that the problem gives: `her 37 friends`, `the $42 bike`."""
ALTERNATIVE = re.compile(r"\b(?:or|either)\b", re.IGNORECASE)
JOINED = re.compile(r"[\s$*]*(?:,|\band\b)?[\s$*]*")
STATEMENT = re.compile(
    r"(?:[a-z'’-]+\s+){1,12}?(?:is|are|was|were|be|has|have|had|gets?|needs?|costs?|pays?|makes?"
    r"|takes?|earns?|equals)\s",
    re.IGNORECASE,
)
SENTENCE = re.compile(r"[.!?](?=[\s*\"')]|$)[*\"')]*|[。！？]")
VALUE_FIRST = re.compile(
    r"\s*\**(\$?[0-9][0-9,]*(?:\.[0-9]+)?(?:\s+(?!it\s+is)[a-z]+){0,2})"
    r"(?:\s+it\s+is)?\**(?:[.!]?\s*\n|[.!]\s+(?=[A-Z]))"
)
"""A response that begins with a bare value."""
CALCULATION = re.compile(r"<<[^<>\n]{0,100}>>")
"""An annotation of GSM8K: `30 - 3 = <<30-3=27>>27`."""
APPOSITION = re.compile(
    r"(?<![0-9.,])[0-9][0-9.,]*+(?:\s+[a-z]+)?\s+(?:less|more|fewer|greater)\s+than\s+"
    r"[^,.;0-9]{1,30},\s+or\s+(?=[$*]*[0-9])",
    re.IGNORECASE,
)
"""What a value is equal to: `3 less than that, or 27`."""
BOLD_TAG = re.compile(r"</?(?:b|strong)>|</?(?:p|i|em|span|div|li|ul|ol|br)\s?/?>", re.IGNORECASE)
BETWEEN_SCRIPTS = re.compile(
    r"(?<=[\u3000-\u9fff\uff00-\uffef])(?=[0-9$])|(?<=[0-9%])(?=[\u3000-\u9fff\uff00-\uffef])"
)
"""Where a number touches Chinese or Japanese text, which has no spaces."""
COPULA = re.compile(r"\b(?:is|are|was|equals|be|get|gives)\s+|=")
IS_FINISHED = re.compile(r"[.!?:;)\]}*\"'”`$]$|^[#\-*=_`]*$")
