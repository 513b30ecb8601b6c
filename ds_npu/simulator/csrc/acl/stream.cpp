// Streams, events and the functions a stream calls on the host.
#include "stream.h"

#include <pthread.h>

#include <cstring>
#include <map>

#include "acl/acl.h"
#include "acl/error_codes/rt_error_codes.h"
#include "api.h"
#include "chaos.h"
#include "settings.h"

using sim::Event;
using sim::Failure;
using sim::Stream;

namespace {

sim::Timeout milliseconds(int32_t timeout) {
  return timeout < 0 ? sim::Timeout{} : sim::Timeout{std::chrono::milliseconds(timeout)};
}

Event& event_of(aclrtEvent handle) {
  if (handle == nullptr) throw Failure(ACL_ERROR_INVALID_PARAM, "the event is a null pointer");
  return *static_cast<Event*>(handle);
}

bool complete(aclrtEvent handle) {
  const auto moment = event_of(handle).last();
  if (moment) moment->device().throw_if_failed();
  return !moment || moment->query();
}

sim::Nanoseconds time_of(aclrtEvent handle) {
  if (sim::settings().task_queue == 2)
    throw Failure(ACL_ERROR_API_NOT_SUPPORT,
                  "TASK_QUEUE_ENABLE=2 hides from the simulator when the host dispatches, so the time of an event is not "
                  "known: set it to 1 or 0");
  const auto moment = event_of(handle).last();
  if (!moment || !moment->reached()) throw Failure(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the event has not been reached");
  return moment->time();
}

void destroy(aclrtStream handle) {
  if (handle == nullptr) throw Failure(ACL_ERROR_INVALID_PARAM, "the default stream cannot be destroyed");
  delete static_cast<Stream*>(handle);
}

}  // namespace

SIM_API(aclError, aclrtCreateStream, (aclrtStream * stream)) { *stream = new Stream(sim::current_device()); }

SIM_API(aclError, aclrtCreateStreamWithConfig, (aclrtStream * stream, uint32_t, uint32_t)) {
  *stream = new Stream(sim::current_device());
}

SIM_API(aclError, aclrtDestroyStream, (aclrtStream stream)) { destroy(stream); }
SIM_API(aclError, aclrtDestroyStreamForce, (aclrtStream stream)) { destroy(stream); }

SIM_API(aclError, aclrtSynchronizeStream, (aclrtStream stream)) { sim::stream_of(stream).synchronize(); }

SIM_API(aclError, aclrtSynchronizeStreamWithTimeout, (aclrtStream stream, int32_t timeout_ms)) {
  sim::stream_of(stream).synchronize(milliseconds(timeout_ms));
}

SIM_API(aclError, aclrtStreamQuery, (aclrtStream stream, aclrtStreamStatus* status)) {
  sim::stream_of(stream).device().throw_if_failed();
  *status = sim::stream_of(stream).query() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
}

SIM_API(aclError, aclrtStreamGetId, (aclrtStream stream, int32_t* id)) { *id = sim::stream_of(stream).id(); }

SIM_API(aclError, aclrtSetStreamFailureMode, (aclrtStream, uint64_t)) {}
SIM_API(aclError, aclrtSetStreamOverflowSwitch, (aclrtStream, uint32_t)) {}
SIM_API(aclError, aclrtGetStreamOverflowSwitch, (aclrtStream, uint32_t* flag)) { *flag = 0; }

SIM_API(aclError, aclrtCreateEventWithFlag, (aclrtEvent * event, uint32_t)) { *event = new Event; }
SIM_API(aclError, aclrtCreateEventExWithFlag, (aclrtEvent * event, uint32_t)) { *event = new Event; }
SIM_API(aclError, aclrtDestroyEvent, (aclrtEvent event)) { delete &event_of(event); }

SIM_API(aclError, aclrtRecordEvent, (aclrtEvent event, aclrtStream stream)) {
  event_of(event).record(sim::stream_of(stream));
}

SIM_API(aclError, aclrtStreamWaitEvent, (aclrtStream stream, aclrtEvent event)) {
  if (const auto moment = event_of(event).last()) sim::Moment::wait(moment, sim::stream_of(stream));
}

// A wait refers to the record that came before it, so there is nothing to reset.
SIM_API(aclError, aclrtResetEvent, (aclrtEvent event, aclrtStream)) { event_of(event); }

SIM_API(aclError, aclrtSynchronizeEvent, (aclrtEvent event)) {
  if (const auto moment = event_of(event).last()) moment->synchronize();
}

SIM_API(aclError, aclrtQueryEventStatus, (aclrtEvent event, aclrtEventRecordedStatus* status)) {
  *status = complete(event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
}

SIM_API(aclError, aclrtQueryEventWaitStatus, (aclrtEvent event, aclrtEventWaitStatus* status)) {
  *status = complete(event) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
}

SIM_API(aclError, aclrtEventElapsedTime, (float* ms, aclrtEvent start, aclrtEvent end)) {
  *ms = static_cast<float>(static_cast<double>(time_of(end) - time_of(start)) / 1e6);
}

SIM_API(aclError, aclrtEventGetTimestamp, (aclrtEvent event, uint64_t* microseconds)) {
  *microseconds = static_cast<uint64_t>(time_of(event) / 1000);
}

SIM_API(aclError, aclrtLaunchHostFunc, (aclrtStream stream, aclrtHostFunc function, void* argument)) {
  sim::stream_of(stream).push({.name = "aclrtLaunchHostFunc", .work = [=] { function(argument); }, .is_foreign = true});
}

namespace {

// Callbacks of aclrtLaunchCallback run in the thread that subscribed to the stream, when it calls aclrtProcessReport.
class Mailbox {
 public:
  void post(std::function<void()> call) {
    const std::scoped_lock lock(mutex_);
    calls_.push_back(std::move(call));
    arrived_.notify_one();
  }
  // False when nothing came within `timeout`.
  bool process(sim::Timeout timeout) {
    std::unique_lock lock(mutex_);
    const auto some = [this] { return !calls_.empty(); };
    if (timeout ? !arrived_.wait_for(lock, *timeout, some) : (arrived_.wait(lock, some), false)) return false;
    const auto call = std::move(calls_.front());
    calls_.pop_front();
    lock.unlock();
    call();
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::function<void()>> calls_;
};

class Subscriptions {
 public:
  std::shared_ptr<Mailbox> of_thread(uint64_t thread) {
    const std::scoped_lock lock(mutex_);
    auto& box = boxes_[thread];
    if (!box) box = std::make_shared<Mailbox>();
    return box;
  }
  void subscribe(uint64_t thread, aclrtStream stream) {
    auto box = of_thread(thread);
    const std::scoped_lock lock(mutex_);
    by_stream_[stream] = std::move(box);
  }
  void unsubscribe(aclrtStream stream) {
    const std::scoped_lock lock(mutex_);
    by_stream_.erase(stream);
  }
  std::shared_ptr<Mailbox> of_stream(aclrtStream stream) {
    const std::scoped_lock lock(mutex_);
    const auto found = by_stream_.find(stream);
    if (found == by_stream_.end()) throw Failure(ACL_ERROR_STREAM_NOT_SUBSCRIBE, "no thread has subscribed to this stream");
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Mailbox>> boxes_;
  std::map<aclrtStream, std::shared_ptr<Mailbox>> by_stream_;
};

Subscriptions& subscriptions() {
  static auto* all = new Subscriptions;
  return *all;
}

}  // namespace

SIM_API(aclError, aclrtSubscribeReport, (uint64_t thread, aclrtStream stream)) { subscriptions().subscribe(thread, stream); }
SIM_API(aclError, aclrtUnSubscribeReport, (uint64_t, aclrtStream stream)) { subscriptions().unsubscribe(stream); }

SIM_API(aclError, aclrtLaunchCallback,
        (aclrtCallback function, void* argument, aclrtCallbackBlockType block, aclrtStream stream)) {
  const auto box = subscriptions().of_stream(stream);
  const auto call = [=] {
    const auto done = std::make_shared<std::promise<void>>();
    box->post([=] {
      function(argument);
      done->set_value();
    });
    if (block != ACL_CALLBACK_BLOCK) return;
    const sim::WithoutTurn others_may_run;
    done->get_future().wait();
  };
  sim::stream_of(stream).push({.name = "aclrtLaunchCallback", .work = call, .is_foreign = true});
}

SIM_API(aclError, aclrtProcessReport, (int32_t timeout_ms)) {
  const auto box = subscriptions().of_thread(static_cast<uint64_t>(pthread_self()));
  if (!box->process(milliseconds(timeout_ms))) throw Failure(ACL_ERROR_WAIT_CALLBACK_TIMEOUT, "no callback came in time");
}
