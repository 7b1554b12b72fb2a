"""Hold the frozen trunk of a causal language model for clients that fine-tune it.

python examples/split_learning/server.py --model FOLDER --listen 127.0.0.1:5600
python examples/split_learning/server.py --help
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from split_learning.serve import main
    from split_learning.settings import OptionError
    from split_learning.wire.errors import AddressError, SecretError, WireError

    try:
        main()
    except (AddressError, OptionError, SecretError, WireError) as error:  # which say what to do
        sys.exit(f"{type(error).__name__}: {error}")
