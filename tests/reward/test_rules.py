"""Rules against answers written out by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from functions.call.function import FatalError
from functions.reward.rules import RULES, as_number, last_boxed, normal_latex


@pytest.mark.parametrize(
    ("rule", "response", "truth", "right"),
    [
        ("exact", " Paris\n", "Paris", True),
        ("exact", "Paris.", "Paris", False),
        ("number", "First 3, then 4, so 1,234.50 dollars.", "1234.5", True),
        ("number", "The answer is -7.", "-7", True),
        ("number", "so it is \\boxed{18}.", "9 * 2 = 18 eggs\n#### 18", True),
        ("number", "no digits here", "0", False),
        ("number", "18 apples, not 17", "18", False),
        ("gsm8k", "He makes 9 * 2 = 18.\n#### 18", "18", True),
        ("gsm8k", "#### 17\nno wait\n#### 1,800", "He sells...\n#### 1800", True),
        ("gsm8k", "The answer is 18", "18", False),
        ("gsm8k", "#### $18", "18", True),
        ("gsm8k", "#### 18" + "x" * 400, "18", False),
        ("boxed", r"so \boxed{\frac{1}{2}}", r"\frac12", True),
        ("boxed", r"so \boxed{0.5}", r"\frac{1}{2}", True),
        ("boxed", r"so \boxed{\dfrac{3}{4}}.", r"\boxed{\tfrac{3}{4}}", True),
        ("boxed", r"\boxed{1} but finally \boxed{2}", "2", True),
        ("boxed", r"\boxed{1} but finally \boxed{2}", "1", False),
        ("boxed", r"\boxed{x = 5}", "5", True),
        ("boxed", r"\boxed{(1, 2)}", "(1,2)", True),
        ("boxed", r"\boxed{5 \text{ cm}}", "5", True),
        ("boxed", r"\boxed{\sqrt3}", r"\sqrt{3}", True),
        ("boxed", r"\boxed{90^\circ}", "90", True),
        ("boxed", r"\boxed{5", "5", False),
        ("boxed", "5", "5", False),
        ("answer", "<think>2+2</think><answer> 4 </answer>", "4", True),
        ("answer", "<answer>3</answer><answer>4</answer>", "3", False),
        ("answer", "4", "4", False),
        ("regex", "we get yes", r"\byes\b", True),
        ("regex", "yesterday", r"\byes\b", False),
        ("format", "<think>a\nb</think>\n<answer>c</answer>", "", True),
        ("format", "<think>a</think> well <answer>c</answer>", "", False),
        ("format", "<think>a<think>b</think></think><answer>c</answer>", "", False),
        ("format", "<answer>c</answer>", "", False),
    ],
)
def test_rule(rule: str, response: str, truth: str, right: bool) -> None:
    assert RULES[rule](response, truth) is right


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1,234.50", Fraction(-2469, 2)),
        ("$12", Fraction(12)),
        ("3/4", Fraction(3, 4)),
        ("50%", Fraction(1, 2)),
        ("1/0", None),
        ("1.2.3", None),
        ("", None),
        ("x", None),
        (".5", Fraction(1, 2)),
    ],
)
def test_numbers_are_read_exactly(text: str, value: Fraction | None) -> None:
    assert as_number(text) == value


def test_a_box_may_hold_boxes_and_braces() -> None:
    assert last_boxed(r"\boxed{\frac{\boxed{1}}{2}}") == "1"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed("none") is None


def test_normal_latex_is_idempotent() -> None:
    for text in (r"\frac12", r"\dfrac{a}{b}", r"x=\sqrt2", r"5\text{ m}", r"\left(1,2\right)", ".5", r"50\%"):
        assert normal_latex(normal_latex(text)) == normal_latex(text)


def test_a_bad_regular_expression_is_named() -> None:
    with pytest.raises(FatalError, match=r"rule:regex: the right answer '\(' is no regular expression"):
        RULES["regex"]("x", "(")
