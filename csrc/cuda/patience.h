// How long the end of a step waits for the device. It looks at every bucket; a device that has let the time run out for
// one of them is not waited for again until something has arrived from it.
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
    void lose() { lost_.store(true); }
    void regain() { lost_.store(false); }

   private:
    const double seconds_;
    std::atomic<bool> lost_{false};
};

}  // namespace superoffload::cuda
