"""Labelled true and false statements, made from the facts in this file.

Facts come in pairs, and the false statements of a pair are its two answers swapped::

    The capital of France is Paris.   true      The capital of France is Rome.    false
    The capital of Italy is Rome.     true      The capital of Italy is Paris.    false

All four share one group. Within a group every subject and every answer is true once and false
once, so neither alone tells a probe anything: only what the model knows of the two together does.
A split by group never puts the same fact on both sides.

Run ``python -m deployments.demo.statements OUT`` to write them as JSON lines.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wllm_ray.digest import canonical_json

__all__ = ["TOPICS", "Topic", "statement_rows", "write_statements"]


@dataclass(frozen=True, slots=True)
class Topic:
    """Facts of one kind.

    Attributes:
        name: The topic, and the first part of its rows' ids.
        template: The sentence, with ``{subject}`` and ``{answer}``.
        pairs: Lines ``subject: answer | subject: answer``. Each answer is wrong for the other
            subject of its line, without argument.
    """

    name: str
    template: str
    pairs: str

    def facts(self) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
        """The pairs, each as two (subject, answer)."""
        for line in self.pairs.strip().splitlines():
            first, second = (fact.split(":") for fact in line.split("|"))
            yield (first[0].strip(), first[1].strip()), (second[0].strip(), second[1].strip())


CAPITALS = """
France: Paris | Italy: Rome
Germany: Berlin | Spain: Madrid
Japan: Tokyo | China: Beijing
Russia: Moscow | Egypt: Cairo
Portugal: Lisbon | Greece: Athens
Poland: Warsaw | Hungary: Budapest
Austria: Vienna | Ireland: Dublin
Sweden: Stockholm | Norway: Oslo
Cuba: Havana | Peru: Lima
Canada: Ottawa | Turkey: Ankara
Finland: Helsinki | Denmark: Copenhagen
Iraq: Baghdad | Iran: Tehran
Kenya: Nairobi | Thailand: Bangkok
"""

CITIES = """
Lyon: France | Munich: Germany
Milan: Italy | Barcelona: Spain
Osaka: Japan | Shanghai: China
Mumbai: India | Lagos: Nigeria
Toronto: Canada | Sydney: Australia
Chicago: the United States | Manchester: England
Rio de Janeiro: Brazil | Istanbul: Turkey
Krakow: Poland | Rotterdam: the Netherlands
Kyoto: Japan | Delhi: India
Naples: Italy | Hamburg: Germany
Marseille: France | Seville: Spain
Vancouver: Canada | Melbourne: Australia
"""

CONTINENTS = """
France: Europe | India: Asia
Nigeria: Africa | Brazil: South America
Japan: Asia | Italy: Europe
Peru: South America | Kenya: Africa
Poland: Europe | China: Asia
Argentina: South America | Ghana: Africa
Vietnam: Asia | Sweden: Europe
Chile: South America | Thailand: Asia
Uganda: Africa | Germany: Europe
Colombia: South America | Ethiopia: Africa
"""

LANGUAGES = """
France: French | Germany: German
Brazil: Portuguese | Mexico: Spanish
Japan: Japanese | China: Chinese
Russia: Russian | Italy: Italian
Egypt: Arabic | England: English
Poland: Polish | Greece: Greek
Turkey: Turkish | Sweden: Swedish
Argentina: Spanish | Portugal: Portuguese
"""

ANIMALS = """
A salmon: a fish | An eagle: a bird
A tuna: a fish | A sparrow: a bird
A shark: a fish | A bee: an insect
A robin: a bird | An ant: an insect
A dog: a mammal | A beetle: an insect
A horse: a mammal | A parrot: a bird
A snake: a reptile | A butterfly: an insect
A lizard: a reptile | An owl: a bird
A cow: a mammal | A trout: a fish
"""

KINDS = """
An apple: a fruit | A hammer: a tool
A violin: a musical instrument | A shirt: a piece of clothing
A banana: a fruit | A car: a vehicle
A carrot: a vegetable | A piano: a musical instrument
A truck: a vehicle | A screwdriver: a tool
A chair: a piece of furniture | A rose: a flower
A sofa: a piece of furniture | A guitar: a musical instrument
Football: a sport | Red: a colour
Tennis: a sport | Gold: a metal
Monday: a day of the week | April: a month
Iron: a metal | Blue: a colour
Friday: a day of the week | June: a month
An oak: a tree | A tulip: a flower
A pine: a tree | A cabbage: a vegetable
"""

OPPOSITES = """
hot: cold | big: small
up: down | black: white
day: night | good: bad
rich: poor | fast: slow
left: right | open: closed
young: old | happy: sad
wet: dry | strong: weak
early: late | full: empty
hard: soft | high: low
light: dark | long: short
"""

MONTHS = """
January: February | May: June
March: April | August: September
July: August | November: December
October: November | February: March
September: October | April: May
"""

SYMBOLS = """
hydrogen: H | oxygen: O
carbon: C | nitrogen: N
helium: He | iron: Fe
gold: Au | silver: Ag
sodium: Na | calcium: Ca
copper: Cu | zinc: Zn
chlorine: Cl | potassium: K
lead: Pb | aluminium: Al
"""

COLOURS = """
grass: green | the sky: blue
snow: white | coal: black
blood: red | a lemon: yellow
milk: white | a carrot: orange
a banana: yellow | a tomato: red
a crow: black | spinach: green
"""

SUMS = """
Two plus two: four | Three plus five: eight
One plus one: two | Four plus three: seven
Five plus five: ten | Two plus three: five
Ten minus one: nine | Six minus three: three
Six plus five: eleven | Nine plus three: twelve
Ten minus four: six | Three minus two: one
"""

WORKPLACES = """
A teacher: a school | A nurse: a hospital
A chef: a kitchen | A farmer: a field
A judge: a court | A librarian: a library
A pilot: an aeroplane | A baker: a bakery
A soldier: the army | A scientist: a laboratory
An actor: a theatre | A waiter: a restaurant
"""

TOPICS = (
    Topic("capitals", "The capital of {subject} is {answer}.", CAPITALS),
    Topic("cities", "The city of {subject} is in {answer}.", CITIES),
    Topic("continents", "{subject} is a country in {answer}.", CONTINENTS),
    Topic("languages", "Most people in {subject} speak {answer}.", LANGUAGES),
    Topic("animals", "{subject} is {answer}.", ANIMALS),
    Topic("kinds", "{subject} is {answer}.", KINDS),
    Topic("opposites", "The opposite of {subject} is {answer}.", OPPOSITES),
    Topic("months", "The month after {subject} is {answer}.", MONTHS),
    Topic("symbols", "The chemical symbol for {subject} is {answer}.", SYMBOLS),
    Topic("colours", "The colour of {subject} is {answer}.", COLOURS),
    Topic("sums", "{subject} equals {answer}.", SUMS),
    Topic("workplaces", "{subject} works in {answer}.", WORKPLACES),
)


def _slug(text: str) -> str:
    without_article = re.sub(r"^(a|an|the) ", "", text.lower())
    return re.sub(r"[^a-z0-9]+", "-", without_article)


def _row(topic: Topic, subject: str, answer: str, group: str, label: int) -> dict[str, Any]:
    return {
        "id": f"{topic.name}-{_slug(subject)}-{'true' if label else 'false'}",
        "prompt": topic.template.format(subject=subject, answer=answer),
        "metadata": {"group": group, "label": label, "topic": topic.name},
    }


def statement_rows() -> Iterator[dict[str, Any]]:
    """All statements in a fixed order, each as ``{id, prompt, metadata}``."""
    for topic in TOPICS:
        for (first, first_answer), (second, second_answer) in topic.facts():
            group = f"{topic.name}-{_slug(first)}-{_slug(second)}"
            yield _row(topic, first, first_answer, group, 1)
            yield _row(topic, first, second_answer, group, 0)
            yield _row(topic, second, second_answer, group, 1)
            yield _row(topic, second, first_answer, group, 0)


def write_statements(path: Path) -> int:
    """Write the statements as strict JSON lines; returns how many.

    A file that already holds exactly these bytes is left alone.
    """
    lines = [canonical_json(row) + b"\n" for row in statement_rows()]
    content = b"".join(lines)
    if not (path.is_file() and path.read_bytes() == content):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return len(lines)


def main() -> None:
    """Write the statements to the file that the command line names."""
    parser = argparse.ArgumentParser(description="Write labelled statements as JSON lines.")
    parser.add_argument("out", type=Path, help="the file to write")
    path = parser.parse_args().out
    print(f"{write_statements(path)} statements in {path}")  # noqa: T201 (a command's output)


if __name__ == "__main__":
    main()
