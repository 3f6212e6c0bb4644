// A server that speaks Google Cloud Storage, for the tests: fake-gcs-server, which knows Google's JSON API. Here it
// knows what object_store asks of the XML API, too: to put an object, on condition, and to list what is behind one.
package main

import (
	"encoding/json"
	"encoding/xml"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/fsouza/fake-gcs-server/fakestorage"
)

func main() {
	address := flag.String("address", "127.0.0.1:4443", "where to listen")
	folder := flag.String("folder", "", "what holds the buckets, each a folder")
	flag.Parse()
	server, err := fakestorage.NewServerWithOptions(fakestorage.Options{
		NoListener:  true,
		PublicHost:  *address,
		ExternalURL: "http://" + *address,
		StorageRoot: *folder,
	})
	if err != nil {
		log.Fatal(err)
	}
	listener, err := net.Listen("tcp", *address)
	if err != nil {
		log.Fatal(err)
	}
	go func() { log.Fatal(http.Serve(listener, asGoogle(server.HTTPHandler(), *address))) }()
	stopped := make(chan os.Signal, 1)
	signal.Notify(stopped, syscall.SIGTERM, syscall.SIGINT)
	<-stopped
}

// asGoogle has the server take what it does not know by itself. Its own paths are /storage and /upload.
func asGoogle(next http.Handler, host string) http.Handler {
	return http.HandlerFunc(func(answer http.ResponseWriter, request *http.Request) {
		// It answers to its own name only, whatever proxy there is before it.
		request.Host = host
		if strings.HasPrefix(request.URL.Path, "//") {
			// So Google's client of Java asks for a batch.
			request.URL.Path = request.URL.Path[1:]
		}
		bucket, object, isObject := strings.Cut(strings.TrimPrefix(request.URL.Path, "/"), "/")
		isJSON := bucket == "storage" || bucket == "upload"
		query := request.URL.Query()
		switch {
		case !isJSON && isObject && request.Method == http.MethodPut:
			put(next, answer, request, bucket, object)
		case !isObject && query.Has("start-after"):
			list(next, answer, request, query.Get("start-after"))
		default:
			next.ServeHTTP(answer, request)
		}
	})
}

// https://cloud.google.com/storage/docs/xml-api/put-object-upload
func put(next http.Handler, answer http.ResponseWriter, request *http.Request, bucket, object string) {
	query := url.Values{"uploadType": {"media"}, "name": {object}}
	if generation := request.Header.Get("x-goog-if-generation-match"); generation != "" {
		query.Set("ifGenerationMatch", generation)
	}
	request.Method = http.MethodPost
	request.URL = &url.URL{Path: "/upload/storage/v1/b/" + bucket + "/o", RawQuery: query.Encode()}
	uploaded := httptest.NewRecorder()
	next.ServeHTTP(uploaded, request)
	tell(answer, uploaded)
}

// https://cloud.google.com/storage/docs/xml-api/get-bucket-list
func list(next http.Handler, answer http.ResponseWriter, request *http.Request, after string) {
	listed := httptest.NewRecorder()
	next.ServeHTTP(listed, request)
	var result fakestorage.ListBucketResult
	if err := xml.Unmarshal(listed.Body.Bytes(), &result); err != nil {
		http.Error(answer, listed.Body.String(), listed.Code)
		return
	}
	var kept []fakestorage.Contents
	for _, object := range result.Contents {
		if object.Key > after {
			kept = append(kept, object)
		}
	}
	result.Contents, result.KeyCount = kept, len(kept)
	xml.NewEncoder(answer).Encode(result)
}

// tell answers as the XML API does: the object's mark in headers, or an error's code.
func tell(answer http.ResponseWriter, uploaded *httptest.ResponseRecorder) {
	var put struct{ Etag, Generation string }
	json.Unmarshal(uploaded.Body.Bytes(), &put)
	if put.Generation != "" {
		answer.Header().Set("ETag", fmt.Sprintf("%q", strings.Trim(put.Etag, `"`)))
		answer.Header().Set("x-goog-generation", put.Generation)
	}
	answer.WriteHeader(uploaded.Code)
	if code, isKnown := codes[uploaded.Code]; isKnown {
		fmt.Fprintf(answer, "<Error><Code>%s</Code></Error>", code)
	}
}

// https://cloud.google.com/storage/docs/xml-api/reference-status
var codes = map[int]string{http.StatusNotFound: "NoSuchBucket", http.StatusPreconditionFailed: "PreconditionFailed"}
