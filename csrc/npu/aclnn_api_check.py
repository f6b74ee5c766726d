"""Generate a source that compares our signatures with CANN's headers, if a toolkit is on the include path.

The signatures are found in the operators' sources, so none can be forgotten.
"""

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
_OPERATOR = re.compile(
    r"^struct \w+\s*: (?P<signature>Signature<[^;{]*>) \{(?:(?!^\};).)*? cann = \"aclnn(?P<name>\w+)\";", re.M | re.S
)
_HEAD = f"""#include <type_traits>

#include "{FOLDER / "aclnn_api.h"}"

using namespace torch_aclnn_ops;
#if __has_include(<aclnn/acl_meta.h>)
#include <aclnn/acl_meta.h>
static_assert(std::is_same_v<decltype(aclCreateTensor), aclnn::CreateTensor>);
static_assert(std::is_same_v<decltype(aclDestroyTensor), aclnn::DestroyTensor>);
static_assert(std::is_same_v<decltype(aclCreateScalar), aclnn::CreateScalar>);
static_assert(std::is_same_v<decltype(aclDestroyScalar), aclnn::DestroyScalar>);
static_assert(std::is_same_v<decltype(aclDestroyAclOpExecutor), aclnn::DestroyExecutor>);
#endif
"""
_CHECK = """#if __has_include(<aclnnop/aclnn_{header}.h>)
#include <aclnnop/aclnn_{header}.h>
static_assert(std::is_same_v<decltype(aclnn{name}GetWorkspaceSize), {signature}::PhaseOne>,
              "aclnn{name}GetWorkspaceSize has another signature in this CANN");
static_assert(std::is_same_v<decltype(aclnn{name}), aclnn::PhaseTwo>,
              "aclnn{name} has another signature in this CANN");
#endif
"""


def signatures() -> dict[str, str]:
    """Return the signatures of CANN's functions, by name without aclnn."""
    sources = "".join(path.read_text() for path in sorted(FOLDER.glob("*.cpp")))
    return {found["name"]: " ".join(found["signature"].split()) for found in _OPERATOR.finditer(sources)}


def source() -> str:
    """Return the text of the source: two assertions for each operator that has a header."""
    checks = [
        _CHECK.format(header=re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(), name=name, signature=signature)
        for name, signature in signatures().items()
    ]
    return _HEAD + "".join(checks)
