// Limits how long the end of a step waits for the device. It waits for every bucket; once one bucket has used up the
// time, it does not wait again until something has arrived from the device.
#pragma once

#include <atomic>

#include "../runtime/completion.h"

namespace superoffload::cuda {

class Patience {
   public:
    explicit Patience(double seconds) : seconds_(seconds) {}
    double seconds() const { return seconds_; }
    // Returns the end of the wait, on the steady clock.
    double until() const { return now_seconds() + (lost_.load() ? 0 : seconds_); }
    void lose() { lost_.store(true); }
    void regain() { lost_.store(false); }

   private:
    const double seconds_;
    std::atomic<bool> lost_{false};
};

}  // namespace superoffload::cuda
