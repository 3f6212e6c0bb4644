"""What tests of how-to pages share: the blocks of a page, and changes of the table that its example keeps."""

from __future__ import annotations

import random
import re


def blocks(page: str, language: str) -> list[str]:
    """The code of that language in a page."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def statement(chance: random.Random) -> str:
    """A change of orders(id, amount), or none."""
    key = chance.randint(1, 40)
    return chance.choice(
        [
            f"insert into orders values ({key}, {chance.random():.4f}) on conflict do nothing",
            f"update orders set amount = {chance.random():.2f} where id % 10 = {key % 10}",
            f"update orders set id = {key + 40} where id = {key}"
            f" and not exists (select from orders where id = {key + 40})",
            f"delete from orders where id = {key}",
            "truncate orders" if chance.random() < 0.02 else "select",
        ]
    )
