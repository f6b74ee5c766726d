"""Entry point of ``python -m torch_aclnn_ops.verify``."""

import signal
import sys

from torch_aclnn_ops.verify import main

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly if the output is piped to head
sys.exit(main())
