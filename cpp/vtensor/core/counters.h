// CoreCounters: totals since the start; see docs/metrics.md. The only list of them: Stats, the
// Python binding and the operations of a trace follow from it.
#pragma once

#include <cstddef>

namespace vtensor {

// X(name, what an operation's line in a trace calls its change; empty: it does not)
#define VTENSOR_COUNTERS(X)                                                                   \
  X(prefix_queries, "")                                                                       \
  X(prefix_query_tokens, "")                                                                  \
  X(prefix_hit_tokens, "hit")                                                                 \
  X(chunks_aliased, "aliased")                                                                \
  X(chunks_copied, "copied")                                                                  \
  X(chunks_evicted, "evicted")                                                                \
  X(chunks_adopted, "adopted")           /* reused in place, in a parked slot */              \
  X(chunks_deduplicated, "deduplicated") /* given up for equal chunks of a recorded prefix */ \
  X(dedup_failures, "dedup_failures")    /* the driver failed; the vTensor kept its chunks */ \
  X(chunks_given_back, "given_back")     /* behind a window */                                \
  X(prefix_window_tokens, "cut")         /* recorded, but without the rows of a window */     \
  X(chunks_swapped_out, "swapped_out")                                                        \
  X(chunks_swapped_in, "swapped_in")                                                          \
  X(chunks_sent, "sent")                  /* to another process, as they are */               \
  X(chunks_sent_copied, "copied_to_send") /* to another process, copied first */              \
  X(chunks_received, "received")          /* from another process */

struct CoreCounters {
#define X(name, trace_name) size_t name = 0;
  VTENSOR_COUNTERS(X)
#undef X
};

}  // namespace vtensor
