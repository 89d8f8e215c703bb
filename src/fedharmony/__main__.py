"""``python -m fedharmony``, and ``torchrun -m fedharmony`` for several processes."""

from fedharmony.cli import main

if __name__ == "__main__":  # not in processes that `--jobs` starts
    main()
