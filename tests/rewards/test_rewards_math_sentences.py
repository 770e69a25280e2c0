"""Math answers in sentences: values that a completion states, denies, bounds or only considers."""

from __future__ import annotations

import pytest

from rollick.rewards.answers import extract_answer
from rollick.rewards.claims import stated_values, trim_claim
from rollick.rewards.notation import words_to_digits

pytest.importorskip("math_verify", reason="the extra rewards is not installed")

from rollick.rewards.math import math_answer

STATED = [
    # prices are not formulas
    ("He had $30 and now has $27 left.", "27"),
    ("Her profit is $200,000 - $130,000 = $70,000.", "70000"),
    ("The answer is \\$27.", "27"),
    # words after the value
    ("The answer is 27 because the sum is odd.", "27"),
    ("The answer is $48 for 4 hours.", "48"),
    ("The answer is about 27.", "27"),
    ("The answer is 27 (not 30).", "27"),
    ("The answer is 27, not 30.", "27"),
    ("The answer is not 30 but 27.", "27"),
    ("The answer is not 30. It is 27.", "27"),
    ("The answer is 27 apples, which we get by adding both.", "27"),
    ("The answer is \\sqrt{2} because the square has area 2.", "\\sqrt{2}"),
    ("The answer is Evelyn because she was the fastest.", "\\text{Evelyn}"),
    ("The answer is that she has 27 apples.", "27"),
    ("The answer is $27$ square units.", "27"),
    ("The answer to the problem is 27.", "27"),
    ("**Final Answer**: 27 apples", "27"),
    ("**Final Answer**\n\n27", "27"),
    ("#### Final Answer\n27", "27"),
    # emphasis, and words after the value
    ("The answer is **27** apples.", "27"),
    ("Answer: **27** apples", "27"),
    ("Final answer: **27** marbles", "27"),
    ("**Final Answer: 27** marbles", "27"),
    ("The answer is **27** (not 30).", "27"),
    ("The answer is **$27** in total.", "27"),
    ("The answer is *27* apples.", "27"),
    ("The answer is __27__ apples", "27"),
    ("The answer is ***27*** apples", "27"),
    ("So she has *27* apples, and __27__ is the answer.", "27"),
    ("So she has _27_ apples left.", "27"),
    ("The answer is 2**3.", "8"),
    ("The answer is 27 apples left over", "27"),
    ("The answer is: twenty-seven (27).", "27"),
    ("The answer is 27 dollars ($27).", "27"),
    ("The answer is nearly 27.", "27"),
    ("It is nearly 27.", "27"),
    ("The total amount is 27 dollars, or $27.", "27"),
    ("The answer is 27" + " " * 300 + "apples", "27"),
    # approximate and grouped numbers
    ("\\boxed{\\approx 12}", "12"),
    ("\\boxed{x \\approx 12}", "12"),
    ("\\boxed{2\\,173}", "2173"),
    ("2\\,173", "2173"),
    ("The answer is 5 million.", "5000000"),
    # plain sentences
    ("So there are 27 apples.\n\nLet me know if you have more questions!", "27"),
    ("The winner is Evelyn.", "Evelyn"),
    ("It cannot be 30, so it must be 27.", "27"),
    ("Therefore, she has **27** apples in 5 baskets.", "27"),
    ("So\n\\[\nx=27\n\\]", "27"),
    ("So the value is $ \\frac{1}{2} $.", "1/2"),
    ("27 is the answer, 30 is the distractor.", "27"),
    ("The answers are \\boxed{1} and \\boxed{2}.", "1, 2"),
    # several numbers in a sentence
    ("Sofia needs $88 more to buy the $519 game.", "88"),
    ("So she has 2655 cards left after giving 5 cards to each of her 37 friends.", "2655"),
    ("The total cost is $1,215, which is under her budget of $1,234.", "1215"),
    ("Her average speed was 22 miles per hour for the 3-hour trip.", "22"),
    ("So Rachel sold **37** tickets over the 3 days at $735 each.", "37"),
    ("It takes Sam 20 minutes to run 9 laps.", "20"),
    ("It would cost her $27 in total.", "27"),
    ("Altogether 938 people signed up: 345 adults and 593 children.", "938"),
    ("It will take her 110 minutes, or 1 hour and 50 minutes.", "110"),
    ("So Lisa has to pay 27 dollars for the 3 books.", "27"),
    ("In 5 years she will be 30, which makes her 27 years old today.", "27"),
    ("The pool, which holds 5 litres, will be empty after 27 minutes.", "27"),
    ("Since 30 of the students play chess, the other 27 do not.", "27"),
    ("The girls are 3 fewer than the boys, or 27.", "27"),
    ("The function takes the value 27 at x = 2.", "27"),
    # equations
    ("He reads 30 - 3 = <<30-3=27>>27 pages.", "27"),
    ("$$\\text{Total} = \\$30 - \\$3 = \\$27$$", "27"),
    ("Hence, $|A \\cup B| = \\mathbf{27}$.", "27"),
    ("It follows that $\\angle ABC = 27^\\circ$.", "27"),
    # conclusions and results of calculations outweigh the numbers around them
    ("If he had 30 cards and lost 3 then he has 30 - 3 = 27 cards in 2 boxes.", "27"),
    ("Rita had 30-3=27 dollars at first.", "27"),
    ("She pays 30 cents, or 30 - 3 = 27 cents with the coupon.", "27"),
    ("Thus, she would have saved $30 - 3 = 27$ gallons.", "27"),
    ("Hence there are $30 - 3 = 27$ values of $k$.", "27"),
    ("The answer is 9 gallons * 3 pints / gallon = 27 pints.", "27"),
    ("$n \\equiv 57 \\equiv 27 \\pmod{30}$", "27"),
    ("\\[\n\\begin{aligned}\nS &= 30 - 3 \\\\\n&= 27.\n\\end{aligned}\n\\]", "27"),
    ("The maximum is 27, which is reached at 30.", "27"),
    ("They need 27 buses: 30 minus the 3 in repair.", "27"),
    ("Thus, it holds 27 6-inch pencils.", "27"),
    ("He had 30, so the 5 of them ate 27 slices.", "27"),
    # marks around the value
    ("\\boxed{\\text{Area} = 27}", "27"),
    ("\\boxed{\\text{The answer is } 27}", "27"),
    ("\\framebox{27}", "27"),
    ("The answer is $\\underline{27}$.", "27"),
    ('The answer is "27".', "27"),
    ("(Answer: 27)", "27"),
    ("The answer is...27.", "27"),
    ("The answer is **27** 😊", "27"),
    ("The answer is 27, and that is final.", "27"),
    ("$\\boxed{27_{10}}$", "27"),
    ("The answer is 27¢.", "27"),
    # text after the answer
    ("There are 27 students. Let me know if anything is unclear.", "27"),
    ("The answer should be 27, unless I misread the question.", "27"),
    ("**Final answer:**\n\n> 27", "27"),
    ("\\textbf{Answer:} $27$", "27"),
    ("Lisa has 27 apples left.\n\nExplanation: she started with 48 and gave away 21.", "27"),
    ("Kevin has 27 cards now. He began with 48 cards and sold 21 of them.", "27"),
    ("She saved $27.\n\nWould you like me to show what she has after 2 years?", "27"),
    ("She pays $27.\n\n(Without the coupon she would have paid $52.)", "27"),
    ("She has 27.\n\nQ: Tom has 3 cars and buys 4 more.\nA: 3 + 4 = 7. The answer is 7.", "27"),
    ("#### 27<|im_end|>", "27"),
    ("The total is 27. The total is 27. The total", "27"),
    ("27. Raj had 48 crayons at first and lost 21 of them.", "27"),
    ("She now has 27 eggs. Great question! 😊", "27"),
    # other notations
    ('{"reasoning": "48 - 21", "answer": 27}', "27"),
    ('```json\n{\n  "final_answer": "27",\n  "confidence": 0.97\n}\n```', "27"),
    ("The correct answer is **(B) 27**.", "27"),
    ("The correct answer is C) 27.", "27"),
    ("$n = 48 - 21 = \\boxed{\\textbf{(C)}\\ 27}$", "27"),
    ("<p>The total cost is <b>$27</b>.</p>", "27"),
    ("That leaves you with twenty-seven cookies.", "27"),
    ("答:还剩27个。", "27"),
    # units
    ("The answer is 5 km.", "5 km"),
    ("The answer is 5 m.", "5"),
    ("The box weighs 5 pounds.", "5 lb"),
    ("27 km/h", "27 kph"),
    ("27 square cm", "27 cm^2"),
    ("She earns 27 dollars per hour.", "$27"),
]
NOT_STATED = [
    ("He had $30 and now has $27 left.", "30"),
    ("The answer is $48 for 4 hours.", "4"),
    ("The answer is 27 (not 30).", "30"),
    ("It is definitely not 27.", "27"),
    ("The answer is not 27.", "27"),
    ("The answer cannot be 27.", "27"),
    ("27 is not the answer.", "27"),
    ("The result is never 27.", "27"),
    ("We exclude 27.", "27"),
    ("I don't think the answer is 27.", "27"),
    ("If the answer is 27, we get a contradiction.", "27"),
    ("The answer is 27? No, it is 30.", "27"),
    ("The answer is 27. No wait, it's 30.", "27"),
    ("The answer is 27 or 30 apples.", "27"),
    ("The answer is 27 apples or 30 apples.", "27"),
    ("The answer is 27 dollars and 50 cents.", "27"),
    ("There are more than 27 apples.", "27"),
    ("The result lies between 20 and 27.", "27"),
    ("x > 27", "27"),
    ("$x \\ge 27$", "27"),
    ("So 2x = 27.", "27"),
    ("It is 20 + 7.", "7"),
    ("30, 27", "27"),
    ("It could be 27.", "27"),
    ("Step 1: We take 27 and then", "27"),
    ("\\boxed{27} and \\boxed{30}", "27"),
    ("Suppose x = 27. Then contradiction.", "27"),
    ("Suppose x = 27.", "27"),
    ("The answer is **not** 27.", "27"),
    ("The answer is **30** (not 27).", "27"),
    ("The answer is **27** or **30**.", "27"),
    ("It costs 30 dollars, or $27.", "27"),
    ("It is 3 * 27", "27"),
    ("The answer is 27 squared.", "27"),
    # a number that is given or belongs to another quantity
    ("So after 3 weeks, Olivia has saved $21 toward the $27 bike.", "27"),
    ("Olivia has 89 flowers, which is 27 more than Sofia.", "27"),
    ("He still needs 6 dollars to get to 27.", "27"),
    ("Tim needs 173 more dollars to buy the bike that costs $27.", "27"),
    ("There are 44 ants in the second colony, 27 times as many as in the first one.", "27"),
    ("1261 cars went through in total, 27 of them in the evening.", "27"),
    ("Sofia is very kind to give her 27 tickets to her friends.", "27"),
    ("The ride takes one hour, so it arrives at **3:27 PM**.", "27"),
    # no answer, or another answer
    ("The bakery made 27 rolls. There is not enough information to answer.", "27"),
    ("Could you clarify the question? You mention 27 marbles.", "27"),
    ("The bakery made 27 rolls and 26 more. Now, how many rolls did it make in total?", "27"),
    (
        "You found that each bus holds 27 people. Now multiply. I'll leave this last step to you.",
        "27",
    ),
    ("\\boxed{27}\n\nWait, that's not right. I forgot the broken ones. Let me redo this.", "27"),
    ("The answer is 27.\n\nHmm, actually, that can't be right.", "27"),
    ("The answer for Emma is 27. But the question is about Janet, who has 58.", "27"),
    ("#### 56\n\nQuestion: 30 - 3?\n#### 27", "27"),
    ("Then the equation is\n\n25x + 34 = 27\n\nNow solve for x.", "27"),
    ("$x^2 = 27$", "27"),
    ("Let's call this number 27.", "27"),
    ("It would be 27 if every row were full.", "27"),
    ("There are 27 rows, but I cannot see how many seats there are.", "27"),
    ("We know that there are 27 of them. What should we do next?", "27"),
    ("First note that there are 27 apples. Then multiply by the price of an apple.", "27"),
    ("I can't solve this. The problem mentions 27 apples.", "27"),
    ("Your guess of 27 is close, but not quite right.", "27"),
    ("Hint: use the fact that there are 27 of them.", "27"),
    # an operand, a difference, an earlier belief
    ("The answer is 27 less than the total.", "27"),
    ("The remainder is 27 divided by 7.", "27"),
    ("To find the profit, we subtract 27 from the revenue.", "27"),
    ("I thought that the answer was 27, but it is not.", "27"),
    ("I think it's 30. It may also be 27.", "27"),
    ("Let x be 27.", "27"),
    ("The maximum is 30, which is reached at 27.", "27"),
    ("Her brother is 27, so Lily, who is 3 years older, is 30 years old.", "27"),
    ("They need 30 buses: 27 plus the 3 in repair.", "27"),
    ("We have $x = 27$ and so $$2x + 1 = 55.$$", "27"),
    ("La respuesta no es 27.", "27"),
    ("答案是 30,而不是 27。", "27"),
    ("\\boxed{x = 27, y = 30}", "30"),
    # the wrong unit
    ("5 km", "5 m"),
    ("\\boxed{5\\text{ km}}", "5 m"),
    ("27 km/h", "27 m/s"),
    ("27 cm^2", "27 cm"),
    ("\\boxed{8\\pi\\text{ cm}}", "8\\pi\\text{ mm}"),
]


@pytest.mark.parametrize(("completion", "answer"), STATED)
def test_a_stated_answer_is_read(completion: str, answer: str):
    assert math_answer(completion, answer).value == 1.0


@pytest.mark.parametrize(("completion", "answer"), NOT_STATED)
def test_a_value_that_is_not_stated_as_the_answer_scores_zero(completion: str, answer: str):
    assert math_answer(completion, answer).value == 0.0


@pytest.mark.parametrize(
    "completion",
    [
        "Area = length × width = 30 m × 57 m = 27 m²",
        "Speed = distance ÷ time = 54 km ÷ 30 h = 27 km/h",
        "So the tank holds 30 L - 3 L = 27 L.",
        "Length left: 30m - 3m = 27m",
        "Area = 30m × 3m = 27m²",
        "The wall is 9 m x 30 m = 27 m².",
        "Volume = area × height = 30 m² × 3 m = 27 m³",
        "She walks 30 m/s × 3 s = 27 m of it.",
        "Density: 30 g / 3 mL = 27 g/mL",
        "The area is $30\\text{ m} \\times 3\\text{ m} = 27\\text{ m}^2$.",
        "\\[30\\,\\mathrm{m} \\cdot 3\\,\\mathrm{m} = 27\\,\\mathrm{m}^2\\]",
        "The answer is 30 m × 3 m = 27 m².",
    ],
)
def test_the_result_of_a_calculation_with_units_is_after_the_last_equals_sign(completion: str):
    assert gives_27_and_not_30(completion)


@pytest.mark.parametrize(
    "completion", ["So 3 m = 27", "2m + 3m = 27", "5 + 2s = 27", "9 × 2 y = 27", "7g - 2g = 27"]
)
def test_a_letter_without_units_around_it_is_an_unknown(completion: str):
    assert math_answer(completion, "27").value == 0.0


@pytest.mark.parametrize(
    "completion",
    [
        "Emma has 27 beads. Here's why: she had 3, bought 30, and used some for a bracelet.",
        "Emma has 27 beads. Here's how I got that: she had 57 and used 30.",
        "Emma has 27 beads. Here’s the reasoning: she had 57. Her sister took 30.",
        "Emma has 27 beads — here's why: she had 57 beads and used 30.",
        "Emma has 27 beads. Let me explain: she had 57. Then she used 30.",
        "Emma has 27 beads. Reason: she had 57 and used 30.",
        "Emma has 27 beads.\n\n**Why?** She had 57 beads. Her sister took 30.",
        "Emma has 27 beads. This is because she had 57, bought none, and used 30.",
        "Emma has 27 beads. Because she had 57 beads, bought none, and used 30.",
        "Emma has 27 beads left.\n\nBecause she had 57 beads and used 30.",
        "Emma has 27 beads. The reason is that she had 57 and her sister took 30.",
        "Emma has 27 beads. We know this because she had 57 and used 30.",
        "Emma has 27 beads. I got this by taking her 57 beads and removing 30.",
    ],
)
def test_an_explanation_after_the_answer_does_not_outweigh_it(completion: str):
    assert gives_27_and_not_30(completion)


@pytest.mark.parametrize(
    "completion",
    [
        "Emma had 57 beads. Because she used 30 of them, she has 27.",
        "Emma had 57 beads. Because she gave away 10, lost 15 and broke 5, she has 27 left.",
        "Emma had 57 beads and used 30. Here's the answer: she has 27 beads.",
        "She had 57 beads in all. This is because 19 boxes have 3 each. She has 57 - 30 = 27 left.",
        "She had 57 beads. Why? Each of 19 boxes has 3. She used 30. So she has 27.",
    ],
)
def test_a_reason_before_the_answer_does_not_hide_it(completion: str):
    assert gives_27_and_not_30(completion)


@pytest.mark.parametrize(
    "completion",
    [
        "This gives a difference of 27 degrees between the high of 57°F and the low of 30°F.",
        "There is a gap of 27 years between the father, who is 57, and the son, who is 30.",
        "It is a drop of 27 degrees between noon (57°F) and midnight (30°F).",
        "That leaves a price difference of $27 between the $57 jacket and the $30 shirt.",
        "He ran 27 miles between mile 3 and mile 30.",
        "So there's a 27-degree difference between the high of 57 and the low of 30.",
        "The difference between the high of 57 and the low of 30 is 27 degrees.",
        "He had 3 tries, and the difference between 57 and 30 is 27.",
        "The 54 marbles are split between 2 boys, not 30, and each gets 27.",
    ],
)
def test_the_bounds_of_a_difference_are_not_the_answer(completion: str):
    assert gives_27_and_not_30(completion)


@pytest.mark.parametrize(
    "completion",
    [
        "The mean is 27.\n\nWould you like me to find the median too? The largest value is 30.",
        "The mean is 27. Do you want me to find the mode, too? The number 30 appears twice.",
        "The total is $27. Let me know if you want it with the tip. Then it is $30.",
        "The total is $27. If you'd like, I can add the tip. Then it is $30.",
        "The total is $27. I can also add the tip if you like. Then it would be $30.",
        "The total is $27.\n\nFeel free to ask more. The price before was $30.",
        "She has 27 pears.\n\nGood work!\n\nWant to try another one? Tom has 33 and eats 30.",
        "She has 27 pears. 😊 Shall I explain? She had 57 and lost 30.",
        "Would you like to know the answer? She has 27 pears, not 30.",
        "Let me know if this is wrong, but after the 30 I get 27 pears.",
        "She has 27 pears. I'd be happy to help with another one: 27 + 3 = 30.",
        "She has 27 pears. Would you like to check it? 27 + 3 = 30, so she has 30 before.",
    ],
)
def test_an_offer_ends_the_answer(completion: str):
    assert gives_27_and_not_30(completion)


@pytest.mark.parametrize(
    "completion",
    [
        "Tom has 30 eggs. Let me explain the steps. 30 - 3 = 27. Tom has 27 eggs.",
        "She had 30. Here's how we can solve it: 30 - 3 = 27.",
        "He had 30 apples. I would be happy to solve this. He lost 3, so he has 27.",
        "Step 1: 10 + 20 = 30. Should I continue? Step 2: 30 - 3 = 27.",
        "There are 9 boxes. If you have 3 pens in each, I will multiply: 9 x 3 = 27. So there are "
        "27 pens, not 30.",
        "There are 30 eggs.\nDetails:\nShe lost 3.\nShe has 27 eggs left.",
        "She has 30 left. Here's how I got it: 32 - 5 = 27, she has 27.",
        "There were 30.\n\nExplanation: he sold 3.\n\n30 - 3 = 27\n\nCheck: 27 + 3 = 30.",
        "He had 30. Here's how we do it: 30 - 3 = 27. Would you like more? I also know 30 + 3.",
        # the explanation of an answer, also if it stops early
        "She has 27 left. Here's how I got it: 10 + 20 = 30. She lost 3 of them.",
        "She has 27 left.\n\nExplanation: 10 + 20 = 30, and 30 - 3 = 27. Check: 27 + 3 = 30.",
        "She has 27 left. Here's why: the total was 57, then she gave away 30.",
        "27 stay.\n\nExplanation: 57 came. 30 of them went home, so we take 57 and remove 30.",
        "**27 minutes**\n\nHere's the reasoning:\n* Altogether she plays 27 minutes, of which 30 "
        "seconds are scales.",
    ],
)
def test_a_solution_after_an_explanation_or_an_offer_begins_is_read(completion: str):
    assert gives_27_and_not_30(completion)


@pytest.mark.parametrize(
    "completion",
    [
        "I'm sorry, but I can't determine the answer. The problem gives us only the number of "
        "rows, 27, and doesn't say how many chairs are in each row.",
        "It's impossible to say how many chairs there are. The number of rows is 27.",
        "The answer can't be found. The number of rows is 27.",
        "I wasn't able to find the result. There are 27 rows.",
        "This can't be solved without the number of chairs in a row. There are 27 rows in total.",
        "There isn't enough information to find the answer. All we know is that there are 27 rows.",
        "The problem doesn't say how many chairs are in a row. It only says that it has 27 rows.",
        "The number of chairs in a row is unknown. The number of rows is 27.",
        "There are some rows of chairs. The only thing we know is that there are 27 of them.",
        "Answer: It cannot be determined, because only the number of rows, 27, is known.",
    ],
)
def test_a_reply_that_says_that_there_is_no_answer_scores_zero(completion: str):
    assert math_answer(completion, "27").value == 0.0


@pytest.mark.parametrize(
    "completion",
    [
        "Could you please tell me the price of a ticket? Without it I can only say that 27 tickets "
        "were sold, not how much money was collected.",
        "Could you tell me how much one ticket costs? There were 27 tickets sold.",
        "27 tickets were sold. Could you please provide the price of one ticket?",
        "Can you give me the price of one ticket? There were 27 tickets sold.",
        "Please let me know the price of one ticket. There were 27 tickets sold.",
        "I would need to know the price of one ticket. There were 27 tickets sold.",
        "If you tell me the price of one ticket, I can multiply it by 27.",
    ],
)
def test_a_reply_that_asks_for_missing_data_scores_zero(completion: str):
    assert math_answer(completion, "27").value == 0.0


@pytest.mark.parametrize(
    "completion",
    [
        "At first I can't determine the answer from the 30 rows.\n\n#### 27",
        "There isn't enough information about the 30. Still, the answer is 27.",
        "We can't determine the price directly, but 3 of the 30 cost $81. Each costs $27.",
        "The number of girls is not given. We compute it: 57 - 30 = 27.",
        "We cannot find the total yet. The 30 are sold, so 27 remain.",
        "She can't find 30 of her 57 marbles. She has 27 left.",
        "She has 27 apples left. Can you tell me how many she has after buying 3 more?",
        "She has 27 apples left. Please let me know if anything is unclear.",
    ],
)
def test_an_answer_in_spite_of_a_difficulty_is_read(completion: str):
    assert gives_27_and_not_30(completion)


@pytest.mark.parametrize(
    "completion",
    [
        "Question: How many pears are left?\nAnswer: Tom had 30 pears. He ate 3. 30 - 3 = 27. So "
        "27 pears are left.",
        "**Answer:** The shop had $30. It spent $3. $30 - $3 = $27. The shop has $27.",
        "Q: How many are there now?\nAnswer:\nThere were 30 cars.\nThen 3 left.\n30 − 3 = 27\nNow "
        "there are 27 cars.",
        "## Answer\n\nEach box holds 30 pens. We take out 3 of them. We calculate 30 - 3 = 27.",
        "Answer: A box holds 30 pens. 30 - 21 = 9 are left. 9 x 3 = 27 are left in 3 boxes.",
        "Answer: Ann has 30 cards. Her 2 friends have 1 + 2 = 3 more, so 27 are hers.",
        "Answer: Tom buys 9 pens for 30 days. They cost 2 + 1 = 3 dollars. 9 x 3 = 27",
        # here the label marks the first value
        "Answer: John has 27 apples left. He eats 2 x 3 = 6 of them each week.",
        "Answer: John has 27 apples. There were 10 + 20 = 30 in the basket.",
        "Answer: She has 27 pears. Check: 27 + 3 = 30.",
        "Answer: There are 27 pears left, because he ate some. 27 + 3 = 30.",
        "Answer: 27 pears. To get 30 we add 3: 27 + 3 = 30.",
        "Answer: She has 27 pears.\n\nSomebody gives her more: 27 + 3 = 30.",
        "Final answer: She has 27 pears. With those of Tom we get 27 + 3 = 30.",
    ],
)
def test_an_answer_label_before_a_whole_solution_is_a_heading(completion: str):
    assert gives_27_and_not_30(completion)


@pytest.mark.parametrize(
    "completion",
    [
        "**TL;DR:** 27 miles.\n\n**Details:** The loop is 30 miles, the shortcut saves 3 miles.",
        "TL;DR: She pays $27.\n\nThe price was $30, and the coupon saves $3.",
        "TLDR: there are 27 pears left.\n\nTom had 57 pears at first. He sold 30.",
        "**TL;DR** — 27\n\nWe begin with 57 and take away the 30 that were sold.",
        "She pays **$27**.\n\nDetails: the price is $30 and she has a coupon of 3 dollars.",
        "TL;DR: 27 pears.\n\nThere are 3 boxes of 19, so 57 pears. He sold 30.",
        "We have 57 pears and sell 30.\n\nTL;DR: 27 pears are left.",
        # a summary without the answer
        "TL;DR: subtract both.\n\nWe have 57 pears and sell 30. So 27 pears are left.",
        "TL;DR: subtract 3 from 30.\n\n30 - 3 = 27, so the total is 27.",
        "TL;DR: she had 30 eggs, lost 3\n\nSo she has 27.",
        "TL;DR: 30. But actually the total is 27.",
        "TL;DR: 30 minus 3.\n\nThe answer is 27.",
    ],
)
def test_a_summary_before_the_details_is_the_answer(completion: str):
    assert gives_27_and_not_30(completion)


@pytest.mark.parametrize(
    "completion",
    [
        "So the volume of the pool is 27 m$^3$.",
        "The answer is 27 cm$^2$.",
        "The area is $27$ cm$^{2}$.",
        "Area of the square: 30 cm²\n\nShaded area: 27 cm² [1 mark]",
        "Area = 30 - 3 = 27 m² (2 marks)",
    ],
)
def test_a_power_of_a_unit_or_the_marks_of_a_step_are_no_value(completion: str):
    assert gives_27_and_not_30(completion)
    assert math_answer(completion, "2").value == 0.0


@pytest.mark.parametrize(
    "completion",
    [
        "There is no solution: squaring gives x = 27, but this value doesn't satisfy the equation.",
        "Squaring gives $x = 27$, but this does not satisfy the original equation. Therefore, "
        "there is no solution.",
        "The equation has no real solution. The only candidate is 27, which does not work.",
        "We get x = 27, but it fails in the first equation.",
        "So there are no solutions, since x = 27 is not allowed.",
    ],
)
def test_a_rejected_solution_is_no_answer(completion: str):
    assert math_answer(completion, "27").value == 0.0


@pytest.mark.parametrize(
    "completion",
    [
        "We get x = 30 or x = 27. But x = 30 does not satisfy the equation, so x = 27.",
        "The solution is x = 27. There are no other solutions.",
        "There are no solutions with x > 27. The only root is x = 27.",
        "x = 27, since the second factor has no real solutions.",
        "There is no solution below 27, so the smallest one is 27.",
        "She has 27 pears, but this does not include the 30 of Tom.",
    ],
)
def test_a_solution_beside_rejected_ones_is_read(completion: str):
    assert gives_27_and_not_30(completion)


@pytest.mark.parametrize(
    "completion",
    [
        "You would have to pay $27 for the shoes. If you also bought the socks, it would be $30, "
        "but the question only asks about the shoes.",
        "The solution is $x = 27$. If you replace the 30 by 57, you get a different solution.",
        "There are 27 pears left. If he had bought 3 more instead, there would be 30 of them.",
        "She pays 27 dollars. If she paid in cash, it would be 30 dollars, but she has a card.",
        # without an answer before it, the supposition is the conclusion
        "Tom has 30 pears. If he eats 3, there would be 27 left.",
        "There are 30 rows. If we also subtract the 3 empty ones, we get 27.",
    ],
)
def test_a_supposition_does_not_replace_the_answer_before_it(completion: str):
    assert gives_27_and_not_30(completion)


@pytest.mark.parametrize(
    "completion",
    [
        "The number that belongs in the blank is 27: ___ + 3 = 30.",
        "The missing number is 27 (30 - ___ = 3).",
        "You have to write 27 in the box: 30 = □ + 3.",
        "The number in the blank is 27. ____ + 3 = 30",
        "To solve ___ + 3 = 30, we subtract 3. The blank is 27.",
    ],
)
def test_an_equation_with_a_blank_does_not_replace_the_number_in_it(completion: str):
    assert gives_27_and_not_30(completion)
    assert math_answer(completion, "3").value == 0.0


def gives_27_and_not_30(completion: str) -> bool:
    scores = [math_answer(completion, answer).value for answer in ("27", "30")]
    return scores == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "digits"),
    [
        ("Twenty-three cookies", "23 cookies"),
        ("one hundred and five", "105"),
        ("two thousand three hundred forty", "2340"),
        ("one of them, the tenth one", "one of them, the tenth one"),
        ("5 thousand", "5 thousand"),
    ],
)
def test_numbers_in_words_are_written_in_digits(text: str, digits: str):
    assert words_to_digits(text) == digits


def test_the_head_of_a_claim_is_its_value():
    assert trim_claim("about 27 apples, not 30") == "27 apples"
    assert trim_claim("not 30 but 27") == "27"
    assert trim_claim("not 30") is None
    assert trim_claim("$1. 5$ since it is so") == "$1. 5$"


def test_only_stated_values_of_a_sentence_count():
    assert stated_values("He had $30 and now has $27 left.") == ["$30", "$27"]
    assert stated_values("It is not 27.") == []
    assert stated_values("We get $x = 4$ in 5 steps.") == ["x = 4"]


def test_a_denied_or_questioned_claim_is_no_marked_answer():
    assert extract_answer("The answer is 4? Hm.", plain=False) is None
    assert extract_answer("The answer is definitely not 4.", plain=False) is None
    assert extract_answer("If the answer is 4, we are done.", plain=False) is None
