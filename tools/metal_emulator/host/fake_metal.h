// What fake_torch.mm needs of fake_metal.mm beyond Metal's own interface.
#pragma once
#include <dispatch/dispatch.h>

#include <string>

namespace fake {

// Where Metal's validation aborts, the fake throws, so that a test sees the message.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

bool on_queue(dispatch_queue_t queue);

// Encoders may be touched on this queue only; nullptr: anywhere.
void set_stream_queue(dispatch_queue_t queue);

// Encoded work is dropped instead of run, and what a mistake left behind is no error: for tests of mistakes.
extern bool drop_work;

}  // namespace fake
