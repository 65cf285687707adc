#include "h3/mailbox.hpp"

#include <stdexcept>

#include "mailbox_layout.hpp"
#include "mailbox_wait.hpp"

namespace h3 {

using namespace mailbox;

namespace {

// Counts a thread that is about to sleep, or no longer does, while the place is still its member's: another's count is
// not touched. A member that dies asleep leaves its count too high until its place is registered anew, which costs
// system calls and no wake.
void count_sleeper(MemberLine& line, std::uint32_t epoch, std::int32_t by) {
  std::uint64_t seen = line.sleepers.load();
  const auto change = static_cast<std::uint64_t>(std::int64_t{by});
  while (seen >> 32 == epoch && !line.sleepers.compare_exchange_weak(seen, seen + change)) {
  }
}

}  // namespace

MailboxCaller::MailboxCaller(const Mailbox& mailbox, Member member, std::uint64_t spin_ns)
    : mailbox_(mailbox), member_(member), spin_ns_(spin_ns) {
  if (member.id >= mailbox.geometry().callers) throw std::invalid_argument("the mailbox has no such caller");
}

// A number whose entry is in use is lost; the next one is the next entry's.
MailboxResult MailboxCaller::claim(std::uint64_t& sequence) const {
  for (std::uint32_t tries = 0; tries < mailbox_.geometry_.entries; ++tries) {
    sequence = mailbox_.header().tail.fetch_add(1) & kSequenceMask;
    Entry& entry = mailbox_.entry(sequence);
    const Word free(entry.word.load());
    const Word claimed(State::kClaimed, sequence, member_.id);
    // Whoever was stopped between the two lines may come a round too late: an entry's number only grows.
    const bool is_ours = free.is(State::kFree) && is_older(free.sequence(), sequence);
    if (!is_ours || !mailbox_.move(entry, free, claimed)) continue;
    // A burial that began after this look finds the entry; for one before, we put it back ourselves.
    if (mailbox_.is_caller(member_)) return MailboxResult::kOk;
    mailbox_.move(entry, claimed, claimed.free());
    return MailboxResult::kBuried;
  }
  return mailbox_.is_caller(member_) ? MailboxResult::kFull : MailboxResult::kBuried;
}

void MailboxCaller::write_request(std::uint64_t sequence, std::span<const char> request, std::uint64_t deadline_ns) {
  MailboxBytes scratch;
  Entry& entry = mailbox_.entry(sequence);
  const std::uint32_t crc = store_message(mailbox_.request_of(sequence), sequence, request, scratch);
  entry.request_bytes.store(static_cast<std::uint32_t>(request.size()), std::memory_order_relaxed);
  entry.request_crc.store(crc, std::memory_order_relaxed);
  entry.deadline_ns.store(deadline_ns, std::memory_order_relaxed);
}

MailboxResult MailboxCaller::post(std::span<const std::span<const char>> requests, std::uint64_t deadline_ns,
                                  std::vector<std::uint64_t>& tickets) {
  std::uint32_t posted = 0;
  MailboxResult result = MailboxResult::kOk;
  for (const std::span<const char>& request : requests) {
    std::uint64_t sequence = 0;
    result = claim(sequence);
    if (result != MailboxResult::kOk) break;
    write_request(sequence, request, deadline_ns);
    const Word claimed(State::kClaimed, sequence, member_.id);
    if (!mailbox_.move(mailbox_.entry(sequence), claimed, claimed.as(State::kPosted))) {
      result = MailboxResult::kBuried;
      break;
    }
    tickets.push_back(sequence);
    ++posted;
  }
  if (posted > 0) mailbox_.announce_posted(posted);
  return result;
}

// Copies the reply to a DONE request and checks it. A torn one is as good as none: the next worker answers.
bool MailboxCaller::receive(Word done, MailboxBytes& reply) const {
  const Entry& entry = mailbox_.entry(done.sequence());
  const std::uint32_t size = entry.reply_bytes.load(std::memory_order_relaxed);
  const std::uint32_t crc = entry.reply_crc.load(std::memory_order_relaxed);
  return size <= mailbox_.geometry_.reply_bytes &&
         load_message(mailbox_.reply_of(done.sequence()), done.as(State::kTaken).bits(), size, crc, reply);
}

// kTimeout: not ended yet.
MailboxResult MailboxCaller::look(std::uint64_t ticket, MailboxBytes& reply) const {
  Entry& entry = mailbox_.entry(ticket);
  for (;;) {
    const Word word(entry.word.load());
    const bool is_ours = word.sequence() == ticket && word.caller() == member_.id;
    if (is_ours && (word.is(State::kPosted) || word.is(State::kTaken))) return MailboxResult::kTimeout;
    if (is_ours && word.is(State::kDone)) {
      const bool is_whole = receive(word, reply);
      if (!mailbox_.move(entry, word, is_whole ? word.free() : word.again())) continue;
      if (is_whole) return MailboxResult::kOk;
      mailbox_.announce_posted(1);
      continue;
    }
    if (is_ours && word.is(State::kFailed)) {
      if (mailbox_.move(entry, word, word.free())) return MailboxResult::kFailed;
      continue;
    }
    return mailbox_.is_caller(member_) ? MailboxResult::kGone : MailboxResult::kBuried;
  }
}

MailboxResult MailboxCaller::wait(std::uint64_t ticket, std::uint64_t deadline_ns, MailboxBytes& reply) {
  MemberLine& line = mailbox_.caller_line(member_.id);
  const Entry& entry = mailbox_.entry(ticket);
  const auto has_ended = [&entry] {
    const Word word(entry.word.load());
    return !word.is(State::kPosted) && !word.is(State::kTaken);
  };
  for (;;) {
    spin(spin_ns_, deadline_ns, has_ended);
    MailboxResult result = look(ticket, reply);
    if (result != MailboxResult::kTimeout || now_ns() >= deadline_ns) return result;
    // Counted first, then the signal is read, then the word: whoever ends the request changes them the other way round.
    count_sleeper(line, member_.epoch, 1);
    const std::uint32_t seen = line.signal.load();
    result = look(ticket, reply);
    if (result == MailboxResult::kTimeout) futex_sleep(line.signal, seen, deadline_ns);
    count_sleeper(line, member_.epoch, -1);
    if (result != MailboxResult::kTimeout) return result;
  }
}

bool MailboxCaller::cancel(std::uint64_t ticket) {
  Entry& entry = mailbox_.entry(ticket);
  for (;;) {
    const Word word(entry.word.load());
    if (word.sequence() != ticket || word.caller() != member_.id || word.is(State::kFree) || word.is(State::kAbandoned))
      return false;
    if (mailbox_.move(entry, word, word.is(State::kTaken) ? word.as(State::kAbandoned) : word.free())) return true;
  }
}

}  // namespace h3
