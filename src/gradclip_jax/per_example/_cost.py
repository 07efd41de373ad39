"""What a norm costs: by Gram matrices of the factors, or by multiplying them out.

With T rows, and axes of lengths d and p, the Gram matrices take `T^2 (d + p)` multiplications and
the product `T d p`. Counted for one example, from shapes alone.
"""

import math

from ._factors import Factor, Lazy, Term

# A product up to this multiple of its smallest factor is written down whole, a larger one in tiles.
_TILE = 4
# Gram matrices may take more multiplications than the product by this factor, if it is large.
_GRAM_EXCESS = 1.5


def rows(term: Term) -> int:
    """T: over how many rows the factors are summed."""
    sizes = term.sizes()
    return math.prod(sizes[k] for k in term.summed())


def _width(term: Term, factor: Factor) -> int:
    """The length of the axes of the value that a factor has; none for row numbers."""
    return math.prod(n for k, n in factor.sizes().items() if k in term.kept() and k != factor.hot)


def elements(term: Term) -> int:
    """The elements of the product."""
    return math.prod(term.shape())


def is_dense(term: Term) -> bool:
    """Whether a term is an ordinary array."""
    return len(term.factors) == 1 and not term.summed()


def gram_cost(lazy: Lazy) -> int:
    """Multiplications by Gram matrices of all terms with all."""
    widths = [sum(_width(t, f) for f in t.factors if f.hot is None) for t in lazy.terms]
    weighted = sum(rows(t) * (w + 1) for t, w in zip(lazy.terms, widths, strict=True))
    return sum(map(rows, lazy.terms)) * weighted


def product_cost(lazy: Lazy) -> int:
    """Multiplications for the products; a factor of row numbers counts as written out."""
    return sum(rows(term) * elements(term) for term in lazy.terms)


def tile_elements(term: Term) -> int:
    """How much of a product is written down at a time."""
    return _TILE * min(math.prod(f.array.shape) for f in term.factors if f.hot is None)


def is_small(lazy: Lazy) -> bool:
    """Whether a product is best written down at once: cheaper to make, and no larger."""
    fits = all(elements(term) <= tile_elements(term) for term in lazy.terms)
    return fits and product_cost(lazy) <= gram_cost(lazy)


def prefers_gram(lazy: Lazy) -> bool:
    """Whether Gram matrices cost less than the product, or little more than a large one."""
    is_large = any(elements(term) > tile_elements(term) for term in lazy.terms)
    return gram_cost(lazy) <= product_cost(lazy) * (_GRAM_EXCESS if is_large else 1)
