-- One tenant's limits, checked and counted in one step, so that no two gateways can both take the last place.
--
-- KEYS  1 log      sorted set, reservation -> when it was made: the last minute, oldest first
--       2 tokens   hash, reservation -> its tokens in the log
--       3 running  sorted set, reservation -> when the lease of its slot ends, unless its gateway renews it
--       4 held     hash, reservation -> the tokens it holds while it runs
--       5 sums     hash: `window` is the sum of 2, `held` the sum of 4, `answers` the sum of 6
--       6 answers  hash, reservation -> the answers that it generates while it runs
--       7 ended    sorted set, reservation -> until when a late command for it is ignored
-- ARGV  1 verb, 2 time or '' for this server's own, 3 window, 4 length of a lease, then
--       for `reserve`: 5 reservation, 6 tokens, 7 requests_per_minute, 8 tokens_per_minute,
--       9 max_concurrent_requests, each '' for none, 10 answers
--       for `settle` and `refund`: 5 reservation, 6 tokens or ''
--       for `renew`: 5.. reservation, tokens, answers, of each reservation that runs
--
-- Times are whole microseconds: exact in a double, and printed by `whole`, since tostring would round them.
-- `settle` and `refund` answer 1 when they ended the reservation, 0 when it had ended before.
-- `renew` answers how many of the reservations had lost their slots. They run, so they get their slots back, even
-- above the limit.
-- A command that a stall delayed can come after the end of its reservation. It changes nothing then.

local log, tokens_of, running, held_of, sums, answers_of = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local ended = KEYS[7]
local verb, window, lease, id = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
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

-- Take a slot for each of a reservation's answers.
local function start(member, tokens, answers)
  put(running, held_of, 'held', member, now + lease, whole(tokens))
  redis.call('HSET', answers_of, member, whole(answers))
  redis.call('HINCRBY', sums, 'answers', whole(answers))
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
  if redis.call('ZSCORE', running, id) or redis.call('ZSCORE', ended, id) then
    return standing('', 0) -- the client sends again what it got no answer for, or has undone it already
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
    start(id, tokens, answers)
  end
  return standing(binding, longest)
end

-- Renew the lease of each reservation that has not ended.
local function renew()
  local lapsed = 0
  for index = 5, #ARGV, 3 do
    local member = ARGV[index]
    if redis.call('ZSCORE', running, member) then
      redis.call('ZADD', running, whole(now + lease), member)
    elseif not redis.call('ZSCORE', ended, member) then
      start(member, tonumber(ARGV[index + 1]), tonumber(ARGV[index + 2]))
      lapsed = lapsed + 1
    end
  end
  return lapsed
end

-- The first call ends the reservation; `actual` of nil takes it out of the log as well.
local function finish(actual)
  if redis.call('ZSCORE', ended, id) then
    return 0
  end
  redis.call('ZADD', ended, whole(now + lease), id)
  if redis.call('ZSCORE', running, id) then
    stop(id)
  end
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
redis.call('ZREMRANGEBYSCORE', ended, '-inf', whole(now))
local answer
if verb == 'reserve' then
  answer = reserve(
    tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
  )
elseif verb == 'renew' then
  answer = renew()
else
  answer = finish(tonumber(ARGV[6]))
end
for _, key in ipairs(KEYS) do
  redis.call('PEXPIRE', key, whole((window + lease) / 1000 + 1000))
end
return answer
