"""Wrong answers, by lab, that a looser check would accept."""

from functools import partial


def named(name, function, **options):
    answer = partial(function, **options)
    answer.__name__ = name
    return answer
