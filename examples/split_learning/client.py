"""Fine-tune adapters of a causal language model whose frozen trunk a server holds.

python examples/split_learning/client.py --model FOLDER --connect 127.0.0.1:5600
python examples/split_learning/client.py --help
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from split_learning.fine_tune import main
    from split_learning.settings import OptionError
    from split_learning.wire.errors import AddressError, SecretError, UnsendableMessage, WireError

    try:
        main()
    except (
        AddressError,
        OptionError,
        SecretError,
        UnsendableMessage,
        WireError,
    ) as error:  # which say what to do
        sys.exit(f"{type(error).__name__}: {error}")
