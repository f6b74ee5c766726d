"""Entry point of ``python -m torch_aclnn_ops.verify``."""

import sys

from torch_aclnn_ops.verify import main

sys.exit(main())
