// How long a call waits for the device. A device that has once let the time run out is asked again, but not waited for
// until it has ended something: the end of a step looks at every bucket, and waits once.
#pragma once

#include <atomic>

#include "../runtime/completion.h"

namespace superoffload::cuda {

class Patience {
   public:
    explicit Patience(double seconds) : seconds_(seconds) {}
    double seconds() const { return seconds_; }
    // On the steady clock.
    double until() const { return now_seconds() + (lost_.load() ? 0 : seconds_); }
    // What was waited for until then has ended, or has not. Returns `ended`.
    bool saw(bool ended) {
        lost_.store(!ended);
        return ended;
    }

   private:
    const double seconds_;
    std::atomic<bool> lost_{false};
};

}  // namespace superoffload::cuda
