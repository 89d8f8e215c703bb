"""Where the time of a federated round goes: the command; the work is done in round_profile.py.

Python has a module of this name, which torch imports. A script's own folder comes first on Python's
path, so for every script of this folder it would be this file: it then steps aside.

    python benchmarks/profile.py [--model Ti] [--method fedharmony] [--labels 20] [--sizes equal]
"""

import importlib.util
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    from round_profile import main

    main()
else:
    spec = importlib.util.spec_from_file_location(
        "profile", Path(os.__file__).with_name("profile.py")
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["profile"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["profile"])
