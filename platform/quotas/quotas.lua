-- One tenant's limits, checked and counted in one step, so that no two gateways can both take the last place.
--
-- KEYS  1 log      sorted set, reservation -> when it was made: the last minute, oldest first
--       2 tokens   hash, reservation -> its tokens in the log
--       3 running  sorted set, reservation -> when its slot lapses if nobody settles it
--       4 held     hash, reservation -> the tokens it holds while it runs
--       5 sums     hash: `window` is the sum of 2, `held` the sum of 4, `answers` the sum of 6
--       6 answers  hash, reservation -> the answers that it generates while it runs
-- ARGV  1 verb, 2 time or '' for this server's own, 3 window, 4 life of a slot, 5 reservation, 6 tokens or '',
--       7.. for `reserve`: requests_per_minute, tokens_per_minute, max_concurrent_requests, each '' for none, and
--       the answers
--
-- Times are whole microseconds: exact in a double, and printed by `whole`, since tostring would round them.
-- `settle` and `refund` answer 1 when they ended the reservation, 0 when it had ended before.

local log, tokens_of, running, held_of, sums, answers_of = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local verb, window, slot, id = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local SLOT_RETRY = 1000000

local function whole(number)
  return string.format('%.0f', number)
end

local function current_time()
  if ARGV[2] ~= '' then
    return tonumber(ARGV[2])
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local now = current_time()

-- Take a reservation out of one of the two pairs of a sorted set and a hash.
local function drop(set, hash, sum, member)
  -- 0 - x, for -x of 0 is printed as -0, which is no integer
  redis.call('HINCRBY', sums, sum, whole(0 - tonumber(redis.call('HGET', hash, member))))
  redis.call('HDEL', hash, member)
  redis.call('ZREM', set, member)
end

-- Take a reservation out of those that run.
local function stop(member)
  drop(running, held_of, 'held', member)
  local answers = redis.call('HGET', answers_of, member) or 0 -- none for one of an earlier version
  redis.call('HINCRBY', sums, 'answers', whole(0 - tonumber(answers)))
  redis.call('HDEL', answers_of, member)
end

local function put(set, hash, sum, member, score, tokens)
  redis.call('ZADD', set, whole(score), member)
  redis.call('HSET', hash, member, tokens)
  redis.call('HINCRBY', sums, sum, tokens)
end

local function older(set, limit)
  return ipairs(redis.call('ZRANGEBYSCORE', set, '-inf', whole(limit)))
end

local function sum_of(name)
  return tonumber(redis.call('HGET', sums, name) or '0')
end

-- When the log's entry at `index` (0 is the oldest) leaves the window; nil where there is none.
local function leaves_in(index)
  local entry = redis.call('ZRANGE', log, index, index, 'WITHSCORES')
  return entry[2] and tonumber(entry[2]) + window - now
end

local function until_tokens(allowed)
  local left = sum_of('window')
  for index, member in ipairs(redis.call('ZRANGE', log, 0, -1)) do
    left = left - tonumber(redis.call('HGET', tokens_of, member))
    if left <= allowed then
      return leaves_in(index - 1)
    end
  end
end

-- Answers {limit or '', wait or '' for never, requests, tokens, empty in, held tokens}.
local function standing(limit, wait)
  return {
    limit,
    wait == math.huge and '' or whole(wait),
    redis.call('ZCARD', log),
    whole(sum_of('window')),
    whole(leaves_in(-1) or 0),
    whole(sum_of('held')),
  }
end

local function reserve(tokens, max_requests, max_tokens, max_running, answers)
  if redis.call('ZSCORE', running, id) then
    return standing('', 0) -- the client sends again what it got no answer for
  end
  local binding, longest = '', 0
  -- A wait of nil never ends; the longest wait is the one worth telling.
  local function refuse(limit, wait)
    wait = wait or math.huge
    if binding == '' or wait > longest then
      binding, longest = limit, wait
    end
  end
  local requests = redis.call('ZCARD', log)
  if max_requests and requests >= max_requests then
    refuse('requests_per_minute', max_requests > 0 and leaves_in(requests - max_requests))
  end
  if max_tokens and sum_of('window') + tokens > max_tokens then
    refuse('tokens_per_minute', tokens <= max_tokens and until_tokens(max_tokens - tokens))
  end
  if max_running and sum_of('answers') + answers > max_running then
    refuse('max_concurrent_requests', answers <= max_running and SLOT_RETRY)
  end
  if binding == '' then
    put(log, tokens_of, 'window', id, now, whole(tokens))
    put(running, held_of, 'held', id, now + slot, whole(tokens))
    redis.call('HSET', answers_of, id, whole(answers))
    redis.call('HINCRBY', sums, 'answers', whole(answers))
  end
  return standing(binding, longest)
end

-- The first call ends the reservation; `actual` of nil takes it out of the log as well.
local function finish(actual)
  if not redis.call('ZSCORE', running, id) then
    return 0
  end
  stop(id)
  local made_at = redis.call('ZSCORE', log, id)
  if made_at then
    drop(log, tokens_of, 'window', id)
    if actual then
      put(log, tokens_of, 'window', id, tonumber(made_at), whole(actual))
    end
  end
  return 1
end

for _, member in older(log, now - window) do
  drop(log, tokens_of, 'window', member)
end
for _, member in older(running, now) do
  stop(member)
end
local answer
if verb == 'reserve' then
  answer = reserve(
    tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
  )
else
  answer = finish(tonumber(ARGV[6]))
end
for _, key in ipairs(KEYS) do
  redis.call('PEXPIRE', key, whole((window + slot) / 1000 + 1000))
end
return answer
