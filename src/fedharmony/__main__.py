"""``python -m fedharmony``, and ``torchrun -m fedharmony`` for several processes."""

from fedharmony.cli import main

main()
