"""What a norm costs: by Gram matrices of the factors, or by multiplying them out.

With T rows, and axes of lengths d and p, the Gram matrices take `T^2 (d + p)` multiplications and
the product `T d p`: it costs less exactly where it is smaller than its factors, `d p < T (d + p)`.
Counted for one example, from shapes alone.
"""

import math

from ._factors import Lazy, Term


def rows(lazy: Lazy) -> int:
    """Counts the products that are summed in all terms."""
    return sum(term.rows() for term in lazy.terms)


def elements(lazy: Lazy) -> int:
    """Counts the elements of a product, without the zeros around it."""
    return max((math.prod(term.shape()) for term in lazy.terms), default=0)


def factor_elements(lazy: Lazy) -> int:
    """Counts the elements of all factors; row numbers count one for each row."""
    return sum(term.rows() * (1 + _width(term)) for term in lazy.terms)


def _width(term: Term) -> int:
    kept, dense = term.kept(), [f.sizes() for f in term.factors if f.hot is None]
    return sum(math.prod(n for k, n in sizes.items() if k in kept) for sizes in dense)


def is_small(lazy: Lazy) -> bool:
    """Decides whether to write a product down: it is no larger than its factors, and costs less."""
    return elements(lazy) <= factor_elements(lazy)
