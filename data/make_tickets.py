"""Turn `tickets.csv` into the job file `tickets.parquet`: `python data/make_tickets.py`.

Each ticket gets one of three labelling tasks. A prompt is

    COMMON (all rows)  +  the task's instructions and examples (a third of the rows)  +  the ticket

so the prefix trie of the job has a root, three children and a leaf per distinct ticket.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import polars as pl

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "tickets.csv"
TARGET = HERE / "tickets.parquet"

MAX_TOKENS = 5
STOP = ["\n"]

COMMON = """\
These are the support tickets of Tilthbox, sorted by the first reader of the inbox. Every ticket gets one \
label, one word in lower case.

Tilthbox is a small indoor garden for the kitchen counter: a water tank with a pump, a lamp on an arm, and \
six pods (twelve in the model Duo) in which herbs, lettuce or tomatoes grow. The app sets the lamp and \
watering schedule, shows the water level and counts the days to harvest. Customers buy the garden once and \
may join Pod Club, a plan that sends new pods and nutrient by parcel every month. Schools, offices and \
restaurants run many gardens under one login.

The label follows what the customer wants done now, not every word that is mentioned: a ticket that names \
the app, an order and a price is still about one thing. Jokes and politeness do not count. Tickets come from \
many countries and may contain slips of grammar.

"""


@dataclass(frozen=True, slots=True)
class Task:
    """One labelling task: what is asked, and a few answered examples in the form of the question.

    Attributes:
        name: the column of `tickets.csv` that holds the gold labels.
        field: the word before the colon that the model completes.
        guide: what the labels mean.
        examples: (ticket, label) pairs; none of them is in `tickets.csv`.
    """

    name: str
    field: str
    guide: str
    examples: tuple[tuple[str, str], ...]

    def prefix(self) -> str:
        """All that the prompts of this task have in common."""
        shots = "".join(f"Ticket: {text}\n{self.field}: {label}\n\n" for text, label in self.examples)
        return f"{COMMON}{self.guide}\n\n{shots}"

    def prompt(self, ticket: str) -> str:
        """The prompt of one ticket; no space at its end, the label's first token brings its own."""
        return f"{self.prefix()}Ticket: {ticket}\n{self.field}:"


CATEGORY = Task(
    name="category",
    field="Category",
    guide="""\
The label is a category, one of these five words: billing, bug, account, shipping, feature.
billing: charges, refunds, invoices, prices
bug: the app or the garden does not work as it should
account: login, password, profile
shipping: delivery, parcels, damaged or missing items
feature: a wish for something new""",
    examples=(
        ("Please add a list of my plants to the app.", "feature"),
        ("When will my order be delivered?", "shipping"),
        ("The garden goes offline every hour.", "bug"),
        ("It would be great if the lamp could be dimmed by voice.", "feature"),
        ("Can I pay the yearly plan by bank transfer?", "billing"),
        ("The app freezes on the harvest screen since the last update.", "bug"),
        ("The tank arrived broken, the carton was torn open.", "shipping"),
        ("How do I change the email address of my profile?", "account"),
        ("Please send me an invoice with our tax number.", "billing"),
        ("I forgot my password and cannot log in.", "account"),
    ),
)

URGENCY = Task(
    name="urgency",
    field="Urgency",
    guide="""\
The label is the urgency, one of these three words: low, medium, high.
low: a question, a wish or praise
medium: something is wrong, but it can wait for a few days
high: danger, stolen money, dying plants, or a deadline within a day or two""",
    examples=(
        ("Smoke is coming out of the base, please call me immediately!", "high"),
        ("My last parcel had only five pods instead of six.", "medium"),
        ("Which pods grow best in winter?", "low"),
        ("All plants are dying, the pump has stopped, help us today!", "high"),
        ("The wrong amount was refunded, please correct it.", "medium"),
        ("Can I have the invoice as a PDF?", "low"),
        ("I cannot log in with my new phone.", "medium"),
        ("It would be nice to have a darker theme in the app.", "low"),
        ("The water sensor shows a wrong value since the update.", "medium"),
        ("Thank you for the nice parcel! Do you ship to Malta?", "low"),
    ),
)

SENTIMENT = Task(
    name="sentiment",
    field="Sentiment",
    guide="""\
The label is the sentiment, one of these three words: positive, neutral, negative.
positive: thanks, praise or joy
neutral: plain facts or a plain question
negative: anger, disappointment or sarcasm""",
    examples=(
        ("I love my garden, thank you so much!", "positive"),
        ("You took my money and nobody answers. Never again.", "negative"),
        ("Great service as always! Can I order a second box?", "positive"),
        ("Can you send me the manual as a PDF?", "neutral"),
        ("How many pods fit into the Duo?", "neutral"),
        ("Nice app, well done! One chart is empty.", "positive"),
        ("Please change my address to 4 Mill Road.", "neutral"),
        ("Two weeks late and then the wrong pods. I am fed up.", "negative"),
        ("This is the third broken lamp. What a waste of money.", "negative"),
        ("My parcel has not arrived, the order number is 90012.", "neutral"),
    ),
)

TASKS = (CATEGORY, URGENCY, SENTIMENT)


def task_of(ticket: str) -> Task:
    """A ticket's task, a function of its text alone, so that a ticket sent twice is the same prompt twice."""
    return TASKS[zlib.crc32(ticket.encode()) % len(TASKS)]


def job_row(ticket: dict[str, str]) -> dict[str, object]:
    """One row of the job file from one row of `tickets.csv`."""
    task = task_of(ticket["text"])
    return {
        "id": ticket["id"],
        "prompt": task.prompt(ticket["text"]),
        "max_tokens": MAX_TOKENS,
        "stop": STOP,
        "task": task.name,
        "gold": ticket[task.name],
        "ticket": ticket["text"],
    }


def make_jobs(source: Path = SOURCE) -> pl.DataFrame:
    """The job table: tasks interleaved, in the order of `source`."""
    tickets = pl.read_csv(source, infer_schema=False)
    return pl.DataFrame([job_row(ticket) for ticket in tickets.iter_rows(named=True)])


if __name__ == "__main__":
    make_jobs().write_parquet(TARGET)
