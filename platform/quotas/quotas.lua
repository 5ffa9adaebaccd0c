-- The limits of one request, of all its owners (organisation, tenant, key, end user), checked and counted in one step:
-- no two gateways can both take the last place, and a request counts for all its owners or for none.
--
-- KEYS  eight for each owner, the widest first. All have one hash tag, so that Redis Cluster keeps them in one slot.
--       1 log      sorted set, reservation -> when it was made: the last minute, oldest first
--       2 tokens   hash, reservation -> its tokens in the log
--       3 running  sorted set, reservation -> when the lease of its slot ends, unless its gateway renews it
--       4 held     hash, reservation -> the tokens it holds while it runs
--       5 sums     hash: `window` is the sum of 2, `held` of 4, `answers` of 6, `cost` of 8
--       6 answers  hash, reservation -> the answers that it generates while it runs
--       7 ended    sorted set, reservation -> until when a late command for it is ignored
--       8 costs    hash, reservation -> the highest cost that it may have, in 10^-9 of a currency
-- ARGV  1 verb, 2 time or '' for this server's own, 3 window, 4 length of a lease, then
--       for `reserve`: 5 reservation, 6 tokens, 7 answers, 8 cost, and then for each owner: requests_per_minute,
--       tokens_per_minute, max_concurrent_requests, each '' for none
--       for `settle` and `refund`: 5 reservation, 6 tokens or ''
--       for `renew`: 5.. reservation, tokens, answers, cost, of each reservation that runs
--
-- Times are whole microseconds: exact in a double, and printed by `whole`, since tostring would round them. Costs stay
-- text: a double would lose digits.
-- `settle` and `refund` answer 1 when they ended the reservation, 0 when it had ended before.
-- `renew` answers how many of the reservations had lost their slots. They run, so they get their slots back, even
-- above the limit.
-- A command that a stall delayed can come after the end of its reservation. It changes nothing then.

local verb, window, lease, id = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local SLOT_RETRY = 1000000
local KEYS_OF_OWNER = 8

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

local owners = {}
for first = 1, #KEYS, KEYS_OF_OWNER do
  owners[#owners + 1] = {
    log = KEYS[first], tokens = KEYS[first + 1], running = KEYS[first + 2], held = KEYS[first + 3],
    sums = KEYS[first + 4], answers = KEYS[first + 5], ended = KEYS[first + 6], costs = KEYS[first + 7],
  }
end

local function negated(text)
  return text == '0' and '0' or '-' .. text
end

-- Take a reservation out of a hash, and out of the sum of the hash. It may be missing: an earlier version had fewer.
local function drop(owner, hash, sum, member)
  local amount = redis.call('HGET', hash, member)
  if amount then
    redis.call('HINCRBY', owner.sums, sum, negated(amount))
    redis.call('HDEL', hash, member)
  end
end

local function put(owner, hash, sum, member, amount)
  redis.call('HSET', hash, member, amount)
  redis.call('HINCRBY', owner.sums, sum, amount)
end

-- Take a reservation out of the last minute.
local function forget(owner, member)
  drop(owner, owner.tokens, 'window', member)
  redis.call('ZREM', owner.log, member)
end

local function remember(owner, member, at, tokens)
  redis.call('ZADD', owner.log, whole(at), member)
  put(owner, owner.tokens, 'window', member, tokens)
end

-- Take a reservation out of those that run.
local function stop(owner, member)
  drop(owner, owner.held, 'held', member)
  drop(owner, owner.answers, 'answers', member)
  drop(owner, owner.costs, 'cost', member)
  redis.call('ZREM', owner.running, member)
end

-- Take a slot for each of a reservation's answers.
local function start(owner, member, tokens, answers, cost)
  redis.call('ZADD', owner.running, whole(now + lease), member)
  put(owner, owner.held, 'held', member, tokens)
  put(owner, owner.answers, 'answers', member, answers)
  if cost ~= '0' then
    put(owner, owner.costs, 'cost', member, cost)
  end
end

local function older(set, limit)
  return ipairs(redis.call('ZRANGEBYSCORE', set, '-inf', whole(limit)))
end

local function sum_of(owner, name)
  return tonumber(redis.call('HGET', owner.sums, name) or '0')
end

-- When the log's entry at `index` (0 is the oldest) leaves the window; nil where there is none.
local function leaves_in(owner, index)
  local entry = redis.call('ZRANGE', owner.log, index, index, 'WITHSCORES')
  return entry[2] and tonumber(entry[2]) + window - now
end

local function until_tokens(owner, allowed)
  local left = sum_of(owner, 'window')
  for index, member in ipairs(redis.call('ZRANGE', owner.log, 0, -1)) do
    left = left - tonumber(redis.call('HGET', owner.tokens, member))
    if left <= allowed then
      return leaves_in(owner, index - 1)
    end
  end
end

-- Answers {owner that refuses or 0, limit or '', wait or '' for never}, and for each owner {requests, tokens, empty in,
-- held tokens, held cost}.
local function standing(owner, limit, wait)
  local answer = { owner, limit, wait == math.huge and '' or whole(wait) }
  for _, one in ipairs(owners) do
    answer[#answer + 1] = redis.call('ZCARD', one.log)
    answer[#answer + 1] = whole(sum_of(one, 'window'))
    answer[#answer + 1] = whole(leaves_in(one, -1) or 0)
    answer[#answer + 1] = whole(sum_of(one, 'held'))
    answer[#answer + 1] = redis.call('HGET', one.sums, 'cost') or '0'
  end
  return answer
end

local function reserve(tokens, answers, cost)
  if redis.call('ZSCORE', owners[1].running, id) or redis.call('ZSCORE', owners[1].ended, id) then
    return standing(0, '', 0) -- the client sends again what it got no answer for, or has undone it already
  end
  local refusing, binding, longest = 0, '', 0
  for index, owner in ipairs(owners) do
    -- A wait of nil never ends; the longest wait is the one worth telling, and of equal ones the widest owner's.
    local function refuse(limit, wait)
      wait = wait or math.huge
      if binding == '' or wait > longest then
        refusing, binding, longest = index, limit, wait
      end
    end
    local first = 9 + 3 * (index - 1)
    local max_requests, max_tokens = tonumber(ARGV[first]), tonumber(ARGV[first + 1])
    local max_running = tonumber(ARGV[first + 2])
    local requests = redis.call('ZCARD', owner.log)
    if max_requests and requests >= max_requests then
      refuse('requests_per_minute', max_requests > 0 and leaves_in(owner, requests - max_requests))
    end
    if max_tokens and sum_of(owner, 'window') + tokens > max_tokens then
      refuse('tokens_per_minute', tokens <= max_tokens and until_tokens(owner, max_tokens - tokens))
    end
    if max_running and sum_of(owner, 'answers') + answers > max_running then
      refuse('max_concurrent_requests', answers <= max_running and SLOT_RETRY)
    end
  end
  if binding == '' then
    for _, owner in ipairs(owners) do
      remember(owner, id, now, whole(tokens))
      start(owner, id, whole(tokens), whole(answers), cost)
    end
  end
  return standing(refusing, binding, longest)
end

-- Renew the lease of each reservation that has not ended.
local function renew()
  local lapsed = 0
  for index = 5, #ARGV, 4 do
    local member, is_lapsed = ARGV[index], 0
    for _, owner in ipairs(owners) do
      if redis.call('ZSCORE', owner.running, member) then
        redis.call('ZADD', owner.running, whole(now + lease), member)
      elseif not redis.call('ZSCORE', owner.ended, member) then
        start(owner, member, ARGV[index + 1], ARGV[index + 2], ARGV[index + 3])
        is_lapsed = 1
      end
    end
    lapsed = lapsed + is_lapsed
  end
  return lapsed
end

-- The first call ends the reservation; `actual` of nil takes it out of the log as well.
local function finish(owner, actual)
  if redis.call('ZSCORE', owner.ended, id) then
    return 0
  end
  redis.call('ZADD', owner.ended, whole(now + lease), id)
  if redis.call('ZSCORE', owner.running, id) then
    stop(owner, id)
  end
  local made_at = redis.call('ZSCORE', owner.log, id)
  if made_at then
    forget(owner, id)
    if actual then
      remember(owner, id, tonumber(made_at), whole(actual))
    end
  end
  return 1
end

for _, owner in ipairs(owners) do
  for _, member in older(owner.log, now - window) do
    forget(owner, member)
  end
  for _, member in older(owner.running, now) do
    stop(owner, member)
  end
  redis.call('ZREMRANGEBYSCORE', owner.ended, '-inf', whole(now))
end
local answer = 0
if verb == 'reserve' then
  answer = reserve(tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8])
elseif verb == 'renew' then
  answer = renew()
else
  for _, owner in ipairs(owners) do
    answer = finish(owner, tonumber(ARGV[6]))
  end
end
for _, key in ipairs(KEYS) do
  redis.call('PEXPIRE', key, whole((window + lease) / 1000 + 1000))
end
return answer
