// Limits the end of a pipeline: work that is under way when it begins has some seconds to finish.
#pragma once

#include <atomic>

#include "../runtime/completion.h"

namespace superoffload::cuda {

class Closing {
   public:
    void begin() { since_.store(now_seconds()); }
    bool begun() const { return since_.load() != 0; }
    double seconds_left() const { return kSeconds - (now_seconds() - since_.load()); }
    bool out_of_time() const { return begun() && seconds_left() < 0; }

   private:
    static constexpr double kSeconds = 5;

    std::atomic<double> since_{0};  // 0: open
};

}  // namespace superoffload::cuda
