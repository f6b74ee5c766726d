// Captured graphs.
#include "ascendcl/acl_names.h"
#include "ascendcl/capture.h"
#include "ascendcl/context.h"
#include "ascendcl/error.h"
#include "ascendcl/queue.h"
#include "ascendcl/statistics.h"

using namespace host_npu;

namespace {

// Not ACL_ERROR_RT_FEATURE_NOT_SUPPORT: torch_npu would only warn and then fail an assertion.
aclError refuse_graph(const char* function, const char* what) {
    return run_api(function, [&] {
        throw Error(ACL_ERROR_FEATURE_UNSUPPORTED, std::string("the host NPU does not simulate ") + what);
    });
}

void require_mode(aclmdlRICaptureMode mode) {
    require(mode >= ACL_MODEL_RI_CAPTURE_MODE_GLOBAL && mode <= ACL_MODEL_RI_CAPTURE_MODE_RELAXED,
            "mode must be 0, 1 or 2, got " + std::to_string(mode));
}

std::shared_ptr<Graph> complete_graph(aclmdlRI handle) {
    auto graph = graphs().get(handle);
    if (!graph->is_complete()) throw Error(ACL_ERROR_RT_MODEL_CAPTURED, "the graph is still being captured");
    return graph;
}

}  // namespace

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
    return run_api(__func__, [&] {
        require_queue();
        require_mode(mode);
        if (soc() == Soc::Ascend910) {
            throw Error(ACL_ERROR_FEATURE_UNSUPPORTED, "the Ascend910 does not capture graphs");
        }
        begin_capture(*stream_of(stream), mode);
    });
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI* modelRI) {
    return run_api(__func__, [&] {
        require(modelRI, "modelRI");
        *modelRI = nullptr;
        require_queue();
        *modelRI = capture_of(stream)->end(*stream_of(stream)).get();
    });
}

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus* status, aclmdlRI* modelRI) {
    return run_api(__func__, [&] {
        require(status, "status");
        const auto capture = captures_are_under_way() ? stream_of(stream)->capture() : nullptr;
        *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
        if (modelRI != nullptr) *modelRI = capture ? capture->graph().get() : nullptr;
        if (!capture) return;
        *status = capture->is_valid() ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED;
    });
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
    return run_api(__func__, [&] {
        require(mode, "mode");
        require_mode(*mode);
        *mode = exchange_capture_mode(*mode);
    });
}

aclError aclmdlRIExecuteAsync(aclmdlRI modelRI, aclrtStream stream) {
    return run_api(__func__, [&] {
        require_queue();
        auto graph = complete_graph(modelRI);
        const auto target = stream_of(stream);
        require(target->device() == graph->device(),
                "the graph was captured on device " + std::to_string(graph->device()) + ", the stream is of device " +
                    std::to_string(target->device()));
        require_uncaptured(*target, "the replay of a graph");
        for (std::size_t place = 0; place < graph->size(); ++place) {
            if (const auto* const launch = graph->task(place)->launch) count_launch(launch);
        }
        target->replay(std::move(graph));
    });
}

aclError aclmdlRIDestroy(aclmdlRI modelRI) {
    return run_api(__func__, [&] {
        complete_graph(modelRI);
        graphs().remove(modelRI);
    });
}

aclError aclmdlRIGetId(aclmdlRI modelRI, uint32_t* modelRIId) {
    return answer(__func__, modelRIId, "modelRIId", [&] { return graphs().get(modelRI)->id(); });
}

aclError aclmdlRIDebugJsonPrint(aclmdlRI, const char*, uint32_t) {
    return refuse_graph(__func__, "dumps of captured graphs");
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) {
    return run_api(__func__, [&] { capture_of(stream)->begin_group(*stream_of(stream)); });
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp* handle) {
    return answer(__func__, handle, "handle", [&] { return capture_of(stream)->end_group(*stream_of(stream)); });
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle) {
    return run_api(__func__, [&] { stream_of(stream)->begin_update(task_groups().get(handle)); });
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) {
    return run_api(__func__, [&] { stream_of(stream)->end_update(); });
}

// torch_npu's first call for a conditional graph. Only some of its headers declare the function, in different ways.
HOST_NPU_EXPORT aclError refuse_condition() __asm__("aclmdlRICondHandleCreate");

aclError refuse_condition() { return refuse_graph("aclmdlRICondHandleCreate", "conditions in captured graphs"); }
