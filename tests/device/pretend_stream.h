// Streams and events of the pretend device. Work runs on the device's own thread, in the order of its stream, and no sooner than
// somebody waits for it or for what depends on it.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <string>

#include "tests/device/pretend_device.h"

namespace h3::testing {

// How far a stream is: what was queued on it up to now.
struct StreamMark {
  c10::StreamId stream = 0;
  int64_t ticket = 0;
};

// Thread-safe, all of it. Waiting throws what work of the device threw: the device has failed then, for good.
c10::StreamId NewStream();
c10::StreamId CurrentStream();                          // Of this thread.
c10::StreamId ExchangeStream(c10::StreamId stream);     // Of this thread; the one before.
void Launch(std::function<void()> work);                // On the current stream.
StreamMark MarkOf(c10::StreamId stream);
bool IsDone(StreamMark mark);
void StreamWaits(c10::StreamId stream, StreamMark mark);  // What is queued on `stream` from now on comes after `mark`.
void Wait(StreamMark mark);                             // The host waits. Counted.
void WaitForAll(bool counted);

void Count(const std::function<void(PretendCounters&)>& add);

}  // namespace h3::testing
