"""Whether compiling pays: it takes seconds before the first round, and spares some in each."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

#: Seconds that compiling takes, and seconds that it spares per number that the layers of a backbone
#: hand on, forward and backward: measured on an H200 (benchmarks/README.md, "crossover"). Constants
#: and not measured in the run, because compiled and uncompiled runs differ in their last bits.
COMPILING_SECONDS, SPARED_SECONDS = 25.0, 9e-11


def compiling_pays(elements: int, images: int) -> bool:
    """Whether a run on a GPU spares more time than compiling takes; says what it decided and why.

    >>> compiling_pays(197 * 192 * 12, 8_000_000), compiling_pays(82 * 192 * 12, 170_000)
    (True, False)

    ``elements`` are those of the backbone; ``images`` are counted as often as they are trained on.
    """
    spared = SPARED_SECONDS * elements * images
    pays = spared > COMPILING_SECONDS
    if elements:
        log.info(
            "%s: it takes about %.0f s and would spare about %.0f s of training on %s images "
            "(engine.compile overrules this).",
            "The model is compiled" if pays else "The model is not compiled",
            COMPILING_SECONDS,
            spared,
            f"{images:,}",
        )
    return pays
