"""Rows on the host."""

from gradclip_jax.monitoring._rows import Names


def test_the_checksum_differs_for_other_names() -> None:
    names = [Names(("a", "b")), Names(("b", "a")), Names(("a\nb",)), Names(("a",), (), ("b",))]
    assert len({x.checksum for x in names}) == len(names)
    assert Names(("a",), ("clip_factor",)).checksum == Names(("a",)).checksum
