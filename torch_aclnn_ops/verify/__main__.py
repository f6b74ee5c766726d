"""Run the command."""

import sys

from torch_aclnn_ops.verify import main

sys.exit(main())
