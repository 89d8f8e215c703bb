"""How large the experiments are: the data sets of each scale and the settings that items vary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedharmony.errors import ConfigError, nearest

#: Clients of Fig. 5 (c, d).
CROWDS = (1000, 1500, 2000, 2500)
#: Seeds that a point has at most.
SEEDS = 3


@dataclass(frozen=True)
class Part:
    """Runs that an item needs: methods and seeds at one point of the settings.

    Attributes:
        name: of the point; parts of the same name share their runs.
        methods: as ``fedharmony compare`` takes them.
        seeds: how many, from 0 on.
        changes: of the study's settings.
        cost: time of a run, as a multiple of a run without changes.
    """

    name: str
    methods: tuple[str, ...]
    seeds: int
    changes: tuple[str, ...] = ()
    cost: float = 1.0


@dataclass(frozen=True)
class Study:
    """One data set at one scale.

    Attributes:
        name: of its folder, and for ``--data NAME=PATH``.
        title: for people.
        config: the built-in config.
        beside: the paper's data set whose figures stand beside.
        needs: what the user must have; empty where nothing.
        changes: of the config.
        gamma: concentration without further changes; empty where clients are given.
        gammas: values of Fig. 6.
        share: participation without further changes.
        shares: values of Fig. 5 (a, b).
        crowd: changes that go with the numbers of clients of Fig. 5 (c, d), and their cost.
        seconds: of one run.
        gigabytes: of this machine's memory that a run takes; none where it was not measured.
        only: names of the items that it is made for; empty for all.
        seeds: of a point.
    """

    name: str
    title: str
    config: str
    beside: str
    needs: str = ""
    changes: tuple[str, ...] = ()
    gamma: str = ""
    gammas: tuple[str, ...] = ()
    share: str = ""
    shares: tuple[str, ...] = ()
    crowd: tuple[tuple[str, ...], float] | None = None
    seconds: float = 60.0
    gigabytes: float | None = None
    only: tuple[str, ...] = ()
    seeds: int = SEEDS

    def base(self, methods: tuple[str, ...], seeds: int | None = None) -> Part:
        """The settings of the study as they are; with fewer seeds than it has, if said so."""
        return Part("base", methods, min(seeds or self.seeds, self.seeds))

    def at_gamma(self, gamma: str, methods: tuple[str, ...]) -> Part:
        """Another label skew."""
        if gamma == self.gamma:
            return self.base(methods)
        return Part(f"gamma-{gamma}", methods, self.seeds, (f"split.gamma={gamma}",))

    def at_share(self, share: str, methods: tuple[str, ...]) -> Part:
        """Another participation."""
        if share == self.share:
            return self.base(methods)
        changes = ("federation.cohort=", f"federation.participation={share}")
        cost = float(share) / float(self.share)
        return Part(f"participation-{share}", methods, self.seeds, changes, cost)

    def with_clients(self, clients: int, methods: tuple[str, ...]) -> Part:
        """The same images on more clients."""
        changes, cost = self.crowd or ((), 1.0)
        changes = (f"split.clients={clients}", *changes)
        return Part(f"clients-{clients}", methods, self.seeds, changes, cost)


@dataclass(frozen=True)
class Scale:
    """A size of the experiments.

    Attributes:
        name: for ``--scale``.
        machine: what the times are of.
        studies: its data sets.
        jobs: runs at once that fill this machine.
        at_once: how many it then carries out in the time of one alone.
        pairs: numbers of labels at which a loop over pairs is timed.
    """

    name: str
    machine: str
    studies: tuple[Study, ...]
    jobs: int = 1
    at_once: float = 1.0
    pairs: tuple[int, ...] = (17, 20, 80, 1628)


DEMO = Scale(
    "demo",
    "two CPU cores",
    (
        Study(
            "digits",
            "the built-in digits",
            "demo",
            "VOC2007",
            changes=("split.gamma=0.25", "federation.participation=0.5", "run.eval_every=4"),
            gamma="0.25",
            gammas=("0.25", "0.5", "1.0"),
            share="0.5",
            shares=("0.25", "0.5", "0.75"),
            # Of 2 to 5 images a client makes five short steps a round: more rounds, longer steps.
            crowd=(
                (
                    *("data.train=5000", "federation.participation=0.04"),
                    *("run.rounds=40", "run.eval_every=20", "train.lr=3e-3"),
                ),
                2.0,
            ),
            seconds=25.0,
            gigabytes=0.8,
        ),
        Study(
            "synthetic",
            "synthetic users, made up, 1,628 labels",
            "synthetic_users",
            "FLAIR",
            # FedHarmony compares 1.3 million pairs of labels for each client.
            changes=("federation.cohort=8", "run.rounds=6", "run.eval_every=6"),
            seconds=60.0,
            gigabytes=5.8,
            only=("fig1", "fig2"),
        ),
    ),
    jobs=2,
    at_once=2,
)
_VOC2012 = Study(
    "voc2012",
    "PASCAL VOC 2012 at 144 pixels, ViT-Ti",
    "voc2012_tiny",
    "VOC2007",
    needs="VOCtrainval_11-May-2012.tar or its folder; weights of ViT-Ti",
    changes=("run.eval_every=6",),
    gamma="0.1",
    gammas=("0.1", "0.25", "0.5", "1.0"),
    share="0.2",
    shares=("0.25", "0.5", "0.75"),
    crowd=(("federation.cohort=", "federation.participation=0.1"), 1.0),
    seconds=40.0,
    gigabytes=4.3,
)
SMALL = Scale(
    "small",
    "one H200 (VOC 2012 measured, others estimated by their images)",
    (
        _VOC2012,
        replace(
            _VOC2012,
            name="coco",
            title="COCO 2017 at 144 pixels, ViT-Ti",
            beside="COCO-80",
            needs="the images and annotations of COCO 2017; weights of ViT-Ti",
            config="coco_tiny",
            seconds=250.0,
            gigabytes=None,
        ),
        Study(
            "flair",
            "FLAIR, 17 coarse labels, at 144 pixels, ViT-Ti",
            "flair_tiny",
            "FLAIR",
            needs="FLAIR in one of its published forms; weights of ViT-Ti",
            changes=("run.eval_every=6",),
            seconds=60.0,
        ),
    ),
    jobs=12,
    at_once=2.5,
)
_WEIGHTS = "weights of ViT-B/16"
_SKEWED = Study(
    "",
    "",
    "",
    "",
    gamma="0.5",
    gammas=("0.25", "0.5", "1.0"),
    share="0.5",
    shares=("0.25", "0.5", "0.75"),
    crowd=((), 1.0),
)
PAPER = Scale(
    "paper",
    "one H200 (estimated by the numbers of images)",
    (
        replace(
            _SKEWED,
            name="voc2007",
            title="PASCAL VOC 2007, ViT-B/16",
            config="voc2007",
            beside="VOC2007",
            needs=f"VOCtrainval_06-Nov-2007.tar and VOCtest_06-Nov-2007.tar; {_WEIGHTS}",
            seconds=300.0,
        ),
        replace(
            _SKEWED,
            name="coco",
            title="COCO-80, ViT-B/16",
            config="coco",
            beside="COCO-80",
            needs=f"the images and annotations of COCO 2014; {_WEIGHTS}",
            seconds=3600.0,
        ),
        Study(
            "flair",
            "FLAIR, 17 coarse labels, ViT-B/16",
            "flair",
            "FLAIR",
            f"FLAIR in one of its published forms; {_WEIGHTS}",
            seconds=900.0,
        ),
    ),
)
SCALES: Mapping[str, Scale] = {scale.name: scale for scale in (DEMO, SMALL, PAPER)}


def scale_of(name: str) -> Scale:
    """The scale of this name, or an error that names them all."""
    if name not in SCALES:
        raise ConfigError(f"--scale {name}: there is no such scale. {nearest(name, SCALES)}")
    return SCALES[name]
