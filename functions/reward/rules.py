r"""Rules: pure functions of a response and the right answer, 1.0 or 0.0.

    rule:exact     the whole response, surrounding space aside
    rule:number    the last number of the response (GSM8K's "flexible" extraction)
    rule:gsm8k     the number after the last `####`
    rule:boxed     what the last \boxed{} or \fbox{} holds, as LaTeX
    rule:answer    what the last <answer></answer> holds
    rule:regex     the right answer is a regular expression that the response has to contain
    rule:code      every test of the row passes on the response's code; rule:code_fraction: the share of them (code.py)
    rule:format    <think>...</think> and then <answer>...</answer>, and nothing else; needs no right answer

verl/utils/reward_score/gsm8k.py and math_reward.py are the models of gsm8k and boxed. Different here: answers that are
numbers are compared as numbers ("1,000" and "1000.0" are equal), and an answer that cannot be compared as LaTeX raises
nothing, it is unequal.
"""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from urllib.parse import urlsplit

from functions.call.function import FatalError

Rule = Callable[[str, str], bool]

TAIL_CHARACTERS = 300
"""The part of a response in which `gsm8k` and `number` look, as verl: an answer stands at the end."""
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
FORMAT = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)


def as_number(text: str) -> Fraction | None:
    """The number that `text` is, exactly: "-1,234.50", "$12", "3/4", "50%" (0.5), or None."""
    text = text.strip().replace(",", "").replace("$", "").replace(" ", "")
    percent = text.endswith("%")
    text = text.removesuffix("\\%").removesuffix("%").rstrip(".")
    if not re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)(/\d+)?", text):
        return None
    above, _, below = text.partition("/")
    if below and int(below) == 0:
        return None
    return Fraction(above) / (int(below) if below else 1) / (100 if percent else 1)


def same(answer: str, truth: str) -> bool:
    """Equal as numbers, else as text without surrounding space."""
    left, right = as_number(answer), as_number(truth)
    return left == right if left is not None and right is not None else answer.strip() == truth.strip()


def exact(response: str, truth: str) -> bool:
    return response.strip() == truth.strip()


def number(response: str, truth: str) -> bool:
    found = NUMBER.findall(response[-TAIL_CHARACTERS:])
    return bool(found) and same(found[-1], _final(truth))


def gsm8k(response: str, truth: str) -> bool:
    found = re.findall(r"####\s*(-?\$?[\d.,]+)", response[-TAIL_CHARACTERS:])
    return bool(found) and same(found[-1], _final(truth))


def _final(truth: str) -> str:
    """The right number: `truth` may be a whole GSM8K solution that ends in `#### number`."""
    return truth.rpartition("####")[2]


def boxed(response: str, truth: str) -> bool:
    found = last_boxed(response)
    if found is None:
        return False
    inner = last_boxed(truth)
    left, right = normal_latex(found), normal_latex(truth if inner is None else inner)
    return left == right or same(_fraction_text(left), _fraction_text(right))


def answer(response: str, truth: str) -> bool:
    found = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    return bool(found) and same(found[-1], truth)


def regex(response: str, truth: str) -> bool:
    try:
        return re.search(truth, response) is not None
    except re.error as error:
        raise FatalError(f"rule:regex: the right answer {truth!r} is no regular expression: {error}") from error


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} or \fbox{...} of a text holds; None without one, or when its braces do not close."""
    starts = list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))
    if not starts:
        return None
    depth = 1
    for at in range(starts[-1].end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[starts[-1].end() : at]
    return None


def normal_latex(text: str) -> str:
    r"""One spelling of a LaTeX answer (Hendrycks et al. 2021, arXiv:2103.03874, `math_equivalence.strip_string`).

    Spaces and sizing commands go, \tfrac and \dfrac become \frac, `\frac12` becomes `\frac{1}{2}`, `\sqrt3` `\sqrt{3}`,
    "x = 5" becomes "5", units in \text{}, degrees, dollars and percent signs go.
    """
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = re.sub(r"\\[td]frac", r"\\frac", text).replace("\\left", "").replace("\\right", "")
    text = re.sub(r"\^\{?\\circ\}?", "", text).replace("\\$", "").replace("$", "")
    text = text.replace("\\%", "").replace("%", "")
    text = re.sub(r"(?<=.)\s*\\(?:text|mbox)\s*\{[^{}]*\}\s*$", "", text)
    text = re.sub(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    name, equals, value = text.partition("=")
    if equals and len(name.strip()) <= 2:
        text = value
    text = re.sub(r"\\(?:,|;|:| |quad|qquad)", "", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac\s*(\w)\s*(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\w)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\s*(\{[^{}]*\})\s*(\w)", r"\\frac\1{\2}", text)
    text = re.sub(r"\s+", "", text).rstrip(".")
    return "0" + text if text.startswith(".") else text


def _fraction_text(latex: str) -> str:
    return re.sub(r"^(-?)\\frac\{(-?\d+)\}\{(\d+)\}$", r"\1\2/\3", latex)


def predicted(name: str, response: str) -> str | None:
    """The answer that rule `name` compares, in one spelling; None: it finds none, or compares none."""
    match name:
        case "exact":
            return response.strip()
        case "number":
            found = NUMBER.findall(response[-TAIL_CHARACTERS:])
        case "gsm8k":
            found = re.findall(r"####\s*(-?\$?[\d.,]+)", response[-TAIL_CHARACTERS:])
        case "boxed":
            inner = last_boxed(response)
            return None if inner is None else normal_latex(inner)
        case "answer":
            found = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
        case _:
            return None
    if not found:
        return None
    number = as_number(found[-1])
    return found[-1].strip() if number is None else str(number)


RULES: Mapping[str, Rule] = {
    "exact": exact,
    "number": number,
    "gsm8k": gsm8k,
    "boxed": boxed,
    "answer": answer,
    "regex": regex,
    "format": lambda response, _truth: FORMAT.fullmatch(response) is not None,
}


def name_of(scorer: str) -> str:
    """What the numbers of one of several scorers are called: `gsm8k` of `rule:gsm8k`, `brief` of `reward.py:brief`."""
    url = urlsplit(scorer)
    return url.path.rpartition("/")[2] or url.netloc if "://" in scorer else scorer.rpartition(":")[2]


CODE_RULES = ("code", "code_fraction")
"""Those that run the response's code against the row's tests (functions/reward/code.py), in a sandbox."""
NEEDS_NO_TRUTH = frozenset(("format",))
